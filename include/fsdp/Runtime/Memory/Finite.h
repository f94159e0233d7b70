//===- Finite.h - whether numbers are numbers -----------------------------===//
#ifndef FSDP_RUNTIME_MEMORY_FINITE_H
#define FSDP_RUNTIME_MEMORY_FINITE_H

#include <ATen/core/Tensor.h>

namespace fsdp::runtime {

/// Whether no element is infinite or NaN, in one pass over the memory of a
/// contiguous tensor of the CPU. True for integers, and for tensors elsewhere,
/// which it does not inspect since that would mean waiting for the device.
bool allFinite(const at::Tensor &tensor);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_MEMORY_FINITE_H
