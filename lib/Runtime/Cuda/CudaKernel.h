//===- CudaKernel.h - code of a plan on a GPU -----------------------------===//
#ifndef FSDP_RUNTIME_CUDA_CUDAKERNEL_H
#define FSDP_RUNTIME_CUDA_CUDAKERNEL_H

#include "fsdp/Runtime/Devices/Device.h"

namespace fsdp::runtime {

/// Device::loadKernel of the index-th GPU: its driver compiles the PTX.
std::unique_ptr<DeviceKernel> loadCudaKernel(int index, const std::string &ptx);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CUDA_CUDAKERNEL_H
