//===- Finite.cpp - whether numbers are numbers ---------------------------===//
#include "fsdp/Runtime/Memory/Finite.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace fsdp::runtime {

namespace {

/// `mask` selects an element's exponent, which is all ones if the element is
/// not finite.
template <typename Bits>
bool allFinite(const void *data, int64_t count, Bits mask) {
  constexpr int64_t kBlock = 4096;
  const auto *bits = static_cast<const Bits *>(data);
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    Bits found = 0;
    for (int64_t i = begin, end = std::min(count, begin + kBlock); i < end; ++i)
      found |= Bits((bits[i] & mask) == mask);
    if (found)
      return false;
  }
  return true;
}

} // namespace

bool allFinite(const at::Tensor &tensor) {
  if (!tensor.is_cpu() || tensor.numel() == 0)
    return true;
  at::Tensor dense = tensor.contiguous();
  const void *data = dense.const_data_ptr();
  switch (tensor.scalar_type()) {
  case at::kFloat:
    return allFinite<uint32_t>(data, dense.numel(), 0x7f800000);
  case at::kDouble:
    return allFinite<uint64_t>(data, dense.numel(), 0x7ff0000000000000);
  case at::kHalf:
    return allFinite<uint16_t>(data, dense.numel(), 0x7c00);
  case at::kBFloat16:
    return allFinite<uint16_t>(data, dense.numel(), 0x7f80);
  default:
    return true;
  }
}

} // namespace fsdp::runtime
