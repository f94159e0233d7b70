//===- Module.cpp - what libfsdp_cuda.so exports --------------------------===//
#include "CudaDevice.h"
#include "CudaError.h"
#include "Kernels.h"
#include "NcclTransport.h"

#include <c10/cuda/CUDAStream.h>

#include <nccl.h>

namespace fsdp::runtime {

namespace {

class Module final : public CudaModule {
public:
  explicit Module(const CudaHost &host) : host(host) {}

  std::unique_ptr<Device> makeDevice(int index) const override {
    return openCudaDevice(index, host);
  }

  std::unique_ptr<Transport>
  makeTransport(const c10::intrusive_ptr<c10d::Store> &store, int64_t rank,
                int64_t worldSize, int gpu,
                const NcclOptions &options) const override {
    return openNcclTransport(store, rank, worldSize, gpu, options);
  }

  void copyFlat(const FlatTable &table, FlatElement flat, FlatElement tensor,
                FlatDirection direction) const override {
    checkCuda(launchFlatCopy(table, flat, tensor, direction,
                             c10::cuda::getCurrentCUDAStream()),
              "copy between tensors and the buffer of a collective");
  }

private:
  const CudaHost host;
};

/// The sizes of structs differ between versions of NCCL.
void checkNccl() {
  int loaded = 0;
  if (ncclGetVersion(&loaded) != ncclSuccess)
    throw InputError("cannot determine the version of NCCL");
  if (loaded != NCCL_VERSION_CODE)
    throw InputError("expected NCCL " + std::to_string(NCCL_VERSION_CODE) +
                     ", which libfsdp_cuda.so was compiled for, got " +
                     std::to_string(loaded));
}

} // namespace

} // namespace fsdp::runtime

extern "C" __attribute__((visibility("default")))
const fsdp::runtime::CudaModule *
fsdpCudaModule(const fsdp::runtime::CudaHost &host) {
  fsdp::runtime::checkNccl();
  static const fsdp::runtime::Module module(host);
  return &module;
}
