//===- NcclTransport.h - collectives over NCCL, in the module -------------===//
#ifndef FSDP_RUNTIME_CUDA_NCCLTRANSPORT_H
#define FSDP_RUNTIME_CUDA_NCCLTRANSPORT_H

#include "fsdp/Runtime/Collectives/NcclTransport.h"

namespace fsdp::runtime {

/// makeNcclTransport.
std::unique_ptr<Transport>
openNcclTransport(const c10::intrusive_ptr<c10d::Store> &store, int64_t rank,
                  int64_t worldSize, int gpu, const NcclOptions &options);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CUDA_NCCLTRANSPORT_H
