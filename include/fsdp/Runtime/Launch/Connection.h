//===- Connection.h - a session's ranks, and how they reach each other ----===//
#ifndef FSDP_RUNTIME_LAUNCH_CONNECTION_H
#define FSDP_RUNTIME_LAUNCH_CONNECTION_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Collectives/Backend.h"
#include "fsdp/Runtime/Collectives/Comm.h"
#include "fsdp/Runtime/Launch/Rendezvous.h"
#include "fsdp/Runtime/Position.h"

#include <chrono>
#include <memory>
#include <string>

namespace fsdp::runtime {

/// That of one plan in a process that outlives failures and may open further
/// plans of the same parameters. Methods but comm() may be called from any
/// thread.
class Connection {
public:
  virtual ~Connection() = default;

  virtual Comm &comm() = 0;
  /// Where others see how far this rank is.
  virtual Position &position() = 0;

  /// Tells the others why this rank fails; the first of all ranks is kept.
  virtual void fail(const std::string &message) = 0;
  /// Whether this rank has failed, or another one that it has heard of.
  virtual bool hasFailed() = 0;
  /// "rank 3: …" of the first that did, once a call has ended by it; empty if
  /// none told.
  virtual std::string failure() = 0;

  /// What keeps the memory of the parameters, beside their tensors.
  virtual std::shared_ptr<const void> memory() const = 0;
};

/// A collective. Adds to the plan what the backend needs; borrows it and the
/// device. `deadline`: of every wait in a step. `other`: that of another plan
/// of the same parameters, by the same backend, in whose memory this one has
/// them. Throws InputError for Shm if the ranks are on more than one host.
std::unique_ptr<Connection> makeConnection(Backend backend, plan::Plan &plan,
                                           Rendezvous &rendezvous,
                                           Device &device,
                                           std::chrono::milliseconds deadline,
                                           const Connection *other);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_LAUNCH_CONNECTION_H
