//===- CudaKernel.cpp - code of a plan on a GPU ---------------------------===//
#include "CudaKernel.h"
#include "CudaError.h"
#include "fsdp/Plan/KernelAbi.h"

#include <c10/cuda/CUDAStream.h>

namespace fsdp::runtime {

namespace {

class CudaKernel final : public DeviceKernel {
public:
  CudaKernel(int index, const std::string &ptx) : index(index) {
    // The driver may wait with compiling until it is asked for the entry, so
    // it gets no buffer for its log.
    checkCuda(cudaLibraryLoadData(&library, ptx.c_str(), nullptr, nullptr, 0,
                                  nullptr, nullptr, 0),
              "load the code of a kernel");
    cudaError_t error = cudaLibraryGetKernel(&kernel, library, plan::kGpuEntry);
    if (error != cudaSuccess)
      (void)cudaLibraryUnload(library);
    checkCuda(error, std::string("load \"") + plan::kGpuEntry +
                         "\" of a kernel's code");
  }
  ~CudaKernel() override { (void)cudaLibraryUnload(library); }

  void launch(const std::vector<void *> &tensors, int64_t trips) override {
    if (trips == 0)
      return;
    std::vector<void *> arguments;
    arguments.reserve(tensors.size());
    for (void *const &tensor : tensors)
      arguments.push_back(const_cast<void **>(&tensor));
    dim3 grid(unsigned((trips + plan::kGpuBlock - 1) / plan::kGpuBlock));
    checkCuda(cudaLaunchKernel(
                  reinterpret_cast<const void *>(kernel), grid,
                  dim3(unsigned(plan::kGpuBlock)), arguments.data(), 0,
                  c10::cuda::getCurrentCUDAStream(c10::DeviceIndex(index))),
              "launch a kernel of the plan");
  }

private:
  const int index;
  cudaLibrary_t library = nullptr;
  cudaKernel_t kernel = nullptr;
};

} // namespace

std::unique_ptr<DeviceKernel> loadCudaKernel(int index,
                                             const std::string &ptx) {
  return std::make_unique<CudaKernel>(index, ptx);
}

} // namespace fsdp::runtime
