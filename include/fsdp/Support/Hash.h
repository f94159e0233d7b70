//===- Hash.h - the hash of files and plans -------------------------------===//
#ifndef FSDP_SUPPORT_HASH_H
#define FSDP_SUPPORT_HASH_H

#include <string>
#include <string_view>

namespace fsdp {

/// "xxh3:" and the 32 lower-case hex digits of XXH3-128 (canonical form).
std::string hashBytes(std::string_view bytes);

} // namespace fsdp

#endif // FSDP_SUPPORT_HASH_H
