//===- AccessAnnotations.h - what ThreadSanitizer does not see ------------===//
//
// LibTorch's kernels are not instrumented. In builds with ThreadSanitizer the
// executor says what memory instructions read, and calls write; in others this
// costs nothing.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_LIB_RUNTIME_EXECUTION_ACCESSANNOTATIONS_H
#define FSDP_LIB_RUNTIME_EXECUTION_ACCESSANNOTATIONS_H

#include <ATen/core/Tensor.h>

#include <utility>

#ifdef FSDP_THREAD_SANITIZER
extern "C" {
void __tsan_read_range(void *address, unsigned long bytes);
void __tsan_write_range(void *address, unsigned long bytes);
}
#endif

namespace fsdp::runtime {

#ifdef FSDP_THREAD_SANITIZER
inline constexpr bool kThreadSanitizer = true;

/// First byte and number of bytes from the first to the last element.
inline std::pair<void *, unsigned long> extentOf(const at::Tensor &tensor) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0)
    return {nullptr, 0};
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d)
    last += (tensor.size(d) - 1) * tensor.stride(d);
  return {const_cast<void *>(tensor.const_data_ptr()),
          static_cast<unsigned long>(last + 1) * tensor.element_size()};
}
inline void annotateRead(const at::Tensor &tensor) {
  if (auto [address, bytes] = extentOf(tensor); bytes > 0)
    __tsan_read_range(address, bytes);
}
inline void annotateWrite(const at::Tensor &tensor) {
  if (auto [address, bytes] = extentOf(tensor); bytes > 0)
    __tsan_write_range(address, bytes);
}
#else
inline constexpr bool kThreadSanitizer = false;

inline void annotateRead(const at::Tensor &) {}
inline void annotateWrite(const at::Tensor &) {}
#endif

} // namespace fsdp::runtime

#endif // FSDP_LIB_RUNTIME_EXECUTION_ACCESSANNOTATIONS_H
