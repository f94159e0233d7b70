//===- CudaMemory.h - ranges of addresses of a GPU and of pinned memory ---===//
#ifndef FSDP_RUNTIME_CUDA_CUDAMEMORY_H
#define FSDP_RUNTIME_CUDA_CUDAMEMORY_H

#include "fsdp/Runtime/Devices/Device.h"

namespace fsdp::runtime {

/// Addresses of the index-th GPU, the current device. Memory comes behind them
/// piece by piece, one allocation for each call of back(); NCCL can register a
/// piece and other processes can map it. Throws RunError.
std::unique_ptr<DeviceMemory> reserveCuda(int index, size_t bytes);

/// Pinned memory of the host. Throws RunError.
std::unique_ptr<DeviceMemory> reservePinned(size_t bytes);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CUDA_CUDAMEMORY_H
