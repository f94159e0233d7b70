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

/// Communicators of CPU tensors. Each has a ProcessGroupGloo of its own, which
/// gets the calls that torch.distributed's functions make of it: what it
/// reduces has the same bits. It listens where c10d does: on the interfaces
/// GLOO_SOCKET_IFNAME, else at the host's name, else on loopback.
///
/// `store` is shared by the ranks and new: no earlier job or attempt has used
/// its keys. A communicator is gone before its transport.
std::unique_ptr<Transport>
makeGlooTransport(const c10::intrusive_ptr<c10d::Store> &store, int64_t rank,
                  int64_t worldSize, const WaitSettings &settings);

/// The same with a deadline of connect() and of each collective, which begins
/// with the wait for it, whatever the others do meanwhile.
std::unique_ptr<Transport>
makeGlooTransport(const c10::intrusive_ptr<c10d::Store> &store, int64_t rank,
                  int64_t worldSize, std::chrono::milliseconds timeout);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_COLLECTIVES_GLOOTRANSPORT_H
