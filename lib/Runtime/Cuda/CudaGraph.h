//===- CudaGraph.h - work of a GPU that is captured and replayed ----------===//
#ifndef FSDP_RUNTIME_CUDA_CUDAGRAPH_H
#define FSDP_RUNTIME_CUDA_CUDAGRAPH_H

#include "fsdp/Runtime/Devices/Device.h"

namespace fsdp::runtime {

/// Device::capture of the index-th GPU. The generator's state is part of the
/// graph as PyTorch makes it: a replay draws what submitting would have drawn.
std::unique_ptr<DeviceGraph>
captureCudaGraph(int index, const std::function<void()> &work);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CUDA_CUDAGRAPH_H
