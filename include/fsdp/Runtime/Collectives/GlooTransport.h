//===- GlooTransport.h - collectives of hosts, over c10d's Gloo -----------===//
#ifndef FSDP_RUNTIME_COLLECTIVES_GLOOTRANSPORT_H
#define FSDP_RUNTIME_COLLECTIVES_GLOOTRANSPORT_H

#include "fsdp/Runtime/Collectives/Communicator.h"
#include "fsdp/Runtime/Collectives/Patience.h"

#include <c10/util/intrusive_ptr.h>

#include <chrono>

namespace c10d {
class Store;
} // namespace c10d

namespace fsdp::runtime {

/// Communicators of CPU tensors. Each has its own ProcessGroupGloo, which gets
/// the same calls that torch.distributed's functions would make, so its
/// reductions have the same bits. It listens where c10d does: on the interfaces
/// in GLOO_SOCKET_IFNAME, else at the host's name, else on loopback.
///
/// `store` is shared by the ranks and new: no earlier job or attempt has used
/// its keys. A communicator must not outlive its transport.
std::unique_ptr<Transport>
makeGlooTransport(const c10::intrusive_ptr<c10d::Store> &store, int64_t rank,
                  int64_t worldSize, const WaitSettings &settings);

/// The same, with a deadline for connect() and for each collective. The
/// deadline of a collective counts from the start of the wait for it, whatever
/// the other ranks do meanwhile.
std::unique_ptr<Transport>
makeGlooTransport(const c10::intrusive_ptr<c10d::Store> &store, int64_t rank,
                  int64_t worldSize, std::chrono::milliseconds timeout);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_COLLECTIVES_GLOOTRANSPORT_H
