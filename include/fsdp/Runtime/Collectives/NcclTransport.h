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
  /// Its deadline is that of connect(), and of each collective from when the
  /// GPU can begin it and nobody moves.
  WaitSettings waits;
  /// Register memory as symmetric windows too: every rank of a communicator
  /// then has the same ranges, of equal sizes, at the same offsets.
  bool windows = false;
};

/// Communicators of tensors of one GPU. A call begins a collective on the
/// current stream and returns when NCCL has put it there.
///
/// A thread watches them, about every 100 ms. When NCCL reports an error, when
/// a collective is late or when a rank tells that it failed, it tells the
/// others and aborts all communicators: what the GPU still does of them ends,
/// its results are worth nothing, and every further call throws. So who waits
/// for the GPU asks failure() after it. If NCCL does not end an abort in ten
/// seconds, the process exits with the message. What is captured in a graph is
/// not watched for being late.
///
/// `store` is shared by the ranks and new: no earlier job or attempt has used
/// its keys. It gets the timeout. registerMemory lets collectives copy from and
/// to memory without a buffer. A communicator is gone before its transport.
/// Throws InputError where this program was built without CUDA.
std::unique_ptr<Transport>
makeNcclTransport(const c10::intrusive_ptr<c10d::Store> &store, int64_t rank,
                  int64_t worldSize, int gpu, const NcclOptions &options = {});

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_COLLECTIVES_NCCLTRANSPORT_H
