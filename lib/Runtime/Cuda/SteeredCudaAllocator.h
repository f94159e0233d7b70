//===- SteeredCudaAllocator.h - the CUDA allocator of a rank --------------===//
//
// SteeredAllocator.h for GPUs: stands before torch's caching allocator, serves
// a thread's allocations from its source where there is one, and counts those
// that go on to torch's.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_CUDA_STEEREDCUDAALLOCATOR_H
#define FSDP_RUNTIME_CUDA_STEEREDCUDAALLOCATOR_H

#include "fsdp/Runtime/CudaModule.h"

#include <cstddef>

namespace fsdp::runtime {

/// Puts the allocator before that of this process; further calls do nothing.
/// What was allocated before is still freed by torch's.
void installSteeredCudaAllocator(const CudaHost &host);

/// Memory of torch's allocator on the current device and stream, counted, and
/// what frees it. After installSteeredCudaAllocator.
void *allocateInCudaHeap(size_t bytes);
void freeInCudaHeap(void *block);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CUDA_STEEREDCUDAALLOCATOR_H
