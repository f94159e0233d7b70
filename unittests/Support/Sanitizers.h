//===- Sanitizers.h - what this program was built with --------------------===//
#ifndef FSDP_UNITTESTS_SUPPORT_SANITIZERS_H
#define FSDP_UNITTESTS_SUPPORT_SANITIZERS_H

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FSDP_ADDRESS_SANITIZER
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#define FSDP_ADDRESS_SANITIZER
#endif

namespace fsdp::test {

/// Under AddressSanitizer a thrown error takes twenty times as long.
#ifdef FSDP_ADDRESS_SANITIZER
inline constexpr bool kAddressSanitizer = true;
#else
inline constexpr bool kAddressSanitizer = false;
#endif

} // namespace fsdp::test

#endif // FSDP_UNITTESTS_SUPPORT_SANITIZERS_H
