//===- CudaDevice.h - a GPU as a rank's device ----------------------------===//
#ifndef FSDP_RUNTIME_CUDA_CUDADEVICE_H
#define FSDP_RUNTIME_CUDA_CUDADEVICE_H

#include "fsdp/Runtime/Devices/CudaModule.h"

namespace fsdp::runtime {

/// The index-th GPU of this process, which becomes the thread's current
/// device. Throws InputError where there is none.
std::unique_ptr<Device> openCudaDevice(int index, const CudaHost &host);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CUDA_CUDADEVICE_H
