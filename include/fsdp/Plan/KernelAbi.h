//===- KernelAbi.h - how the runtime calls the code of a kernel -----------===//
//
// What compiler and runtime agree on. A kernel is one function with C's calling
// convention; it calls nothing but the imports, and touches no memory but the
// tensors.
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

} // namespace fsdp::plan

#endif // FSDP_PLAN_KERNELABI_H
