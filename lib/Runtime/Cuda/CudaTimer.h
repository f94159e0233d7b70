//===- CudaTimer.h - when a GPU gets where --------------------------------===//
#ifndef FSDP_RUNTIME_CUDA_CUDATIMER_H
#define FSDP_RUNTIME_CUDA_CUDATIMER_H

#include "fsdp/Runtime/Devices/Timer.h"

#include <memory>

namespace fsdp::runtime {

/// Marks are events of the index-th GPU, all created here.
std::unique_ptr<Timer> makeCudaTimer(int index, size_t marks);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CUDA_CUDATIMER_H
