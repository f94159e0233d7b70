//===- Kernels.h - what nvcc compiles -------------------------------------===//
#ifndef FSDP_RUNTIME_CUDA_KERNELS_H
#define FSDP_RUNTIME_CUDA_KERNELS_H

#include "fsdp/Runtime/Devices/FlatLayout.h"

#include <cuda_runtime_api.h>

namespace fsdp::runtime {

/// Copies all tiles of the table on `stream`; returns the launch's error.
cudaError_t launchFlatCopy(const FlatTable &table, FlatElement flat,
                           FlatElement tensor, FlatDirection direction,
                           cudaStream_t stream);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CUDA_KERNELS_H
