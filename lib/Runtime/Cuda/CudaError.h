//===- CudaError.h - errors of the CUDA runtime as the runtime's ----------===//
#ifndef FSDP_RUNTIME_CUDA_CUDAERROR_H
#define FSDP_RUNTIME_CUDA_CUDAERROR_H

#include "fsdp/Runtime/Error.h"

#include <cuda_runtime_api.h>

#include <string>

namespace fsdp::runtime {

/// "invalid argument (cudaErrorInvalidValue)".
inline std::string describe(cudaError_t error) {
  return std::string(cudaGetErrorString(error)) + " (" +
         cudaGetErrorName(error) + ")";
}

/// Throws RunError, "cannot <what>: …", unless `error` is none.
inline void checkCuda(cudaError_t error, const std::string &what) {
  if (error == cudaSuccess)
    return;
  (void)cudaGetLastError(); // or the next launch would report it
  throw RunError("cannot " + what + ": " + describe(error));
}

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CUDA_CUDAERROR_H
