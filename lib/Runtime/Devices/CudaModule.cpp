//===- CudaModule.cpp - loading the CUDA half of the runtime --------------===//
#include "fsdp/Runtime/Devices/CudaModule.h"
#include "fsdp/Runtime/Error.h"

#include <ATen/Context.h>

#include <string>

#include <dlfcn.h>

namespace fsdp::runtime {

namespace {

/// Stays loaded: kernels and allocators are registered in ATen.
const CudaModule &load() {
  // Found by the RUNPATH of the program or module that contains this code.
  void *library = dlopen("libfsdp_cuda.so", RTLD_NOW | RTLD_LOCAL);
  if (!library)
    throw InputError("no CUDA in this program: expected libfsdp_cuda.so in "
                     "../lib beside it, got: " +
                     std::string(dlerror()));
  auto *make = reinterpret_cast<const CudaModule *(*)(const CudaHost &)>(
      dlsym(library, "fsdpCudaModule"));
  if (!make)
    throw InputError("expected fsdpCudaModule in libfsdp_cuda.so, got: " +
                     std::string(dlerror()));
  if (!at::globalContext().hasCUDART())
    throw InputError("expected libfsdp_cuda.so to be loaded before anything "
                     "asks ATen about CUDA, got it after");
  return *make({&currentAllocationSource, &freeRaw, &countAllocatedBytes,
                &countHeapAllocation});
}

} // namespace

const CudaModule &cudaModule() {
  static const CudaModule &module = load();
  return module;
}

std::unique_ptr<Device> makeCudaDevice(int index) {
  return cudaModule().makeDevice(index);
}

} // namespace fsdp::runtime
