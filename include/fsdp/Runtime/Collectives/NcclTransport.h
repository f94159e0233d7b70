//===- NcclTransport.h - collectives of GPUs, over NCCL -------------------===//
#ifndef FSDP_RUNTIME_COLLECTIVES_NCCLTRANSPORT_H
#define FSDP_RUNTIME_COLLECTIVES_NCCLTRANSPORT_H

#include "fsdp/Runtime/Collectives/Communicator.h"
#include "fsdp/Runtime/Collectives/Patience.h"

#include <c10/util/intrusive_ptr.h>

#include <cstddef>

namespace c10d {
class Store;
} // namespace c10d

namespace fsdp::runtime {

struct NcclOptions {
  /// Their deadline applies to connect(), and to each collective from the time
  /// when the GPU can begin it and no rank moves on.
  WaitSettings waits;
  /// Register memory as symmetric windows too: every rank of a communicator
  /// must then register the same ranges, of equal sizes, at the same offsets.
  bool windows = false;
};

/// Communicators for tensors of one GPU. A call begins a collective on the
/// current stream and returns when NCCL has put it there.
///
/// A thread checks them about every 100 ms. When NCCL reports an error, when a
/// collective is late or when a rank reports that it failed, the thread tells
/// the other ranks and aborts all communicators: collectives in flight on the
/// GPU end with undefined results, and every further call throws. So whoever
/// waits for the GPU must ask failure() afterwards. If NCCL does not finish an
/// abort within ten seconds, the process exits with the message. Collectives
/// captured in a graph are not checked for being late.
///
/// `store` is shared by the ranks and new: no earlier job or attempt has used
/// its keys. The store's timeout is set here. registerMemory lets collectives
/// copy from and to memory without a buffer. A communicator must not outlive
/// its transport. Throws InputError if this program was built without CUDA.
std::unique_ptr<Transport>
makeNcclTransport(const c10::intrusive_ptr<c10d::Store> &store, int64_t rank,
                  int64_t worldSize, int gpu, const NcclOptions &options = {});

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_COLLECTIVES_NCCLTRANSPORT_H
