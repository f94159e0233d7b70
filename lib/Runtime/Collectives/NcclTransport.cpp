//===- NcclTransport.cpp - collectives of GPUs, over NCCL -----------------===//
#include "fsdp/Runtime/Collectives/NcclTransport.h"
#include "fsdp/Runtime/Devices/CudaModule.h"

namespace fsdp::runtime {

std::unique_ptr<Transport>
makeNcclTransport(const c10::intrusive_ptr<c10d::Store> &store, int64_t rank,
                  int64_t worldSize, int gpu, const NcclOptions &options) {
  return cudaModule().makeTransport(store, rank, worldSize, gpu, options);
}

} // namespace fsdp::runtime
