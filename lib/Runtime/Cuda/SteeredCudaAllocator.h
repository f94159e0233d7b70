//===- SteeredCudaAllocator.h - the CUDA allocator of a rank --------------===//
//
// SteeredAllocator.h for GPUs: stands before torch's caching allocator, serves
// a thread's allocations from its source where there is one, and counts those
// that go on to torch's.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_CUDA_STEEREDCUDAALLOCATOR_H
#define FSDP_RUNTIME_CUDA_STEEREDCUDAALLOCATOR_H

#include "fsdp/Runtime/Devices/CudaModule.h"

#include <c10/cuda/CUDAStream.h>

#include <cstddef>

namespace fsdp::runtime {

/// Puts the allocator before that of this process; further calls do nothing.
/// What was allocated before is still freed by torch's.
void installSteeredCudaAllocator(const CudaHost &host);

/// Memory of torch's allocator on the current device and stream, counted, and
/// what frees it. After installSteeredCudaAllocator.
void *allocateInCudaHeap(size_t bytes);
void freeInCudaHeap(void *block);

/// From now on what the heap gets back is given out again only when what
/// `stream` has by then is done. Torch orders a block by the stream that it was
/// allocated on, and the host frees what the other streams of a plan may still
/// have to read.
void keepMemoryForStream(c10::cuda::CUDAStream stream);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CUDA_STEEREDCUDAALLOCATOR_H
