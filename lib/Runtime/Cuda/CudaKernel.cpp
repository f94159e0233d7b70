//===- CudaKernel.cpp - code of a plan on a GPU ---------------------------===//
#include "CudaKernel.h"
#include "CudaError.h"
#include "fsdp/Plan/KernelAbi.h"

#include <c10/cuda/CUDAStream.h>

#include <array>

namespace fsdp::runtime {

namespace {

class CudaKernel final : public DeviceKernel {
public:
  CudaKernel(int index, const std::string &ptx) : index(index) {
    // What the driver says of code that it does not take.
    std::array<char, 1024> log{};
    std::array<cudaJitOption, 2> options = {cudaJitErrorLogBuffer,
                                            cudaJitErrorLogBufferSizeBytes};
    std::array<void *, 2> values = {
        log.data(), reinterpret_cast<void *>(uintptr_t(log.size() - 1))};
    cudaError_t error = cudaLibraryLoadData(
        &library, ptx.c_str(), options.data(), values.data(),
        unsigned(options.size()), nullptr, nullptr, 0);
    if (error != cudaSuccess) {
      std::string said = log.data();
      said = said.substr(0, said.find('\n'));
      checkCuda(error, "load the code of a kernel" +
                           (said.empty() ? "" : " (" + said + ")"));
    }
    error = cudaLibraryGetKernel(&kernel, library, plan::kGpuEntry);
    if (error != cudaSuccess)
      (void)cudaLibraryUnload(library);
    checkCuda(error, std::string("find the entry \"") + plan::kGpuEntry +
                         "\" of a kernel");
  }
  ~CudaKernel() override { (void)cudaLibraryUnload(library); }

  void launch(const std::vector<void *> &tensors, int64_t trips) override {
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
