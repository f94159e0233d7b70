//===- Finite.h - whether numbers are numbers -----------------------------===//
#ifndef FSDP_RUNTIME_MEMORY_FINITE_H
#define FSDP_RUNTIME_MEMORY_FINITE_H

#include <ATen/core/Tensor.h>

namespace fsdp::runtime {

/// Whether no element is infinite or NaN, in one pass over the memory of a
/// contiguous tensor of the CPU. True of integers, and of tensors elsewhere, at
/// which it does not look: a device would have to be waited for.
bool allFinite(const at::Tensor &tensor);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_MEMORY_FINITE_H
