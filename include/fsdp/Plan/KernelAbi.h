//===- KernelAbi.h - how the runtime calls the code of a kernel -----------===//
//
// What compiler and runtime agree on. A kernel is one function, on a CPU with
// C's calling convention; it calls nothing but the imports, and touches no
// memory but the tensors.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_PLAN_KERNELABI_H
#define FSDP_PLAN_KERNELABI_H

#include <cstdint>

namespace fsdp::plan {

/// `tensors` has the first element of each operand, then of each result, and
/// `imports` the functions that KernelCode::imports names, in its order. The
/// call runs trips [begin, end) of the kernel's loop; calls of distinct ranges
/// may run on several threads at once.
using KernelFunction = void (*)(void *const *tensors, void *const *imports,
                                int64_t begin, int64_t end);

/// The code of a kernel for a GPU is PTX. Its entry of this name takes the
/// first element of each operand, then of each result, in the GPU's memory. It
/// is launched with kGpuBlock threads a block, and each of the first `trips`
/// threads of the grid runs one trip.
inline constexpr const char *kGpuEntry = "fsdp_kernel";
inline constexpr int64_t kGpuBlock = 256;
/// What the address of each tensor must be a multiple of, in bytes.
inline constexpr int64_t kGpuAlign = 16;

} // namespace fsdp::plan

#endif // FSDP_PLAN_KERNELABI_H
