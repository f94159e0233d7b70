//===- CudaFixture.h - the GPU of the tests -------------------------------===//
#ifndef FSDP_UNITTESTS_CUDA_CUDAFIXTURE_H
#define FSDP_UNITTESTS_CUDA_CUDAFIXTURE_H

#include "fsdp/Runtime/Devices/Device.h"

namespace fsdp::test {

/// GPU 0. Without one no test runs.
runtime::Device &gpu();

} // namespace fsdp::test

#endif // FSDP_UNITTESTS_CUDA_CUDAFIXTURE_H
