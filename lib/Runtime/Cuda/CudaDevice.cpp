//===- CudaDevice.cpp - a GPU as a rank's device --------------------------===//
#include "CudaDevice.h"
#include "CudaError.h"
#include "CudaGraph.h"
#include "CudaKernel.h"
#include "CudaMemory.h"
#include "CudaStreams.h"
#include "CudaTimer.h"
#include "SteeredCudaAllocator.h"

#include <ATen/Context.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <nvtx3/nvToolsExt.h>

#include <mutex>

namespace fsdp::runtime {

namespace {

class CudaDevice final : public Device {
public:
  explicit CudaDevice(int index)
      : device(c10::DeviceType::CUDA, c10::DeviceIndex(index)) {}

  c10::Device where() const override { return device; }
  size_t alignment() const override { return 512; }
  std::string architecture() const override {
    int major = 0, minor = 0;
    auto ask = [&](int &value, cudaDeviceAttr attribute) {
      checkCuda(cudaDeviceGetAttribute(&value, attribute, device.index()),
                "query the compute capability");
    };
    ask(major, cudaDevAttrComputeCapabilityMajor);
    ask(minor, cudaDevAttrComputeCapabilityMinor);
    return "sm_" + std::to_string(major) + std::to_string(minor);
  }
  std::unique_ptr<DeviceKernel> loadKernel(const std::string &code) override {
    return loadCudaKernel(device.index(), code);
  }
  std::unique_ptr<DeviceMemory> reserve(size_t bytes) override {
    return reserveCuda(device.index(), bytes);
  }
  std::unique_ptr<DeviceMemory> reserveHost(size_t bytes) override {
    return reservePinned(bytes);
  }
  void copy(void *to, const void *from, size_t bytes) override {
    checkCuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault,
                              c10::cuda::getCurrentCUDAStream(device.index())),
              "copy " + std::to_string(bytes) + " bytes");
  }
  void *allocate(size_t bytes) override { return allocateInCudaHeap(bytes); }
  c10::DeleterFnPtr deleter() const override { return &freeInCudaHeap; }
  void seed(uint64_t seed) override {
    at::Generator own = generator();
    std::lock_guard guard(own.mutex());
    own.set_current_seed(seed);
  }
  at::Generator generator() override {
    return at::cuda::detail::getDefaultCUDAGenerator(device.index());
  }
  std::unique_ptr<Streams> makeStreams() override {
    return makeCudaStreams(device.index());
  }
  std::unique_ptr<DeviceGraph>
  capture(const std::function<void()> &work) override {
    captures = true;
    try {
      auto graph = captureCudaGraph(device.index(), work);
      captures = false;
      return graph;
    } catch (...) {
      captures = false;
      throw;
    }
  }
  bool isCapturing() const override { return captures; }
  std::unique_ptr<Timer> makeTimer(size_t marks) override {
    return makeCudaTimer(device.index(), marks);
  }
  void beginRange(const char *name) override { nvtxRangePushA(name); }
  void endRange() override { nvtxRangePop(); }
  void synchronize() override {
    checkCuda(cudaDeviceSynchronize(), "wait for the work of the GPU");
  }

private:
  const c10::Device device;
  bool captures = false;
};

} // namespace

std::unique_ptr<Device> openCudaDevice(int index, const CudaHost &host) {
  int count = 0;
  std::string expected = "expected GPU " + std::to_string(index) + ", got ";
  if (cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    (void)cudaGetLastError();
    throw InputError(expected + "no GPU: " + describe(error));
  }
  if (index < 0 || index >= count)
    throw InputError(expected + std::to_string(count) +
                     " GPUs, numbered from 0");
  c10::cuda::set_device(c10::DeviceIndex(index));
  at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
  installSteeredCudaAllocator(host);
  return std::make_unique<CudaDevice>(index);
}

} // namespace fsdp::runtime
