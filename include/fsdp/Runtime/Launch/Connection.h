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

/// The connection of one plan, in a process that survives failures and may open
/// further plans of the same parameters. All methods except comm() may be
/// called from any thread.
class Connection {
public:
  virtual ~Connection() = default;

  virtual Comm &comm() = 0;
  /// Where others see how far this rank is.
  virtual Position &position() = 0;

  /// Tells the others why this rank fails; only the first message of all ranks
  /// is kept.
  virtual void fail(const std::string &message) = 0;
  /// Whether this rank has failed, or has heard that another one has.
  virtual bool hasFailed() = 0;
  /// "rank 3: …", from the first rank that failed, once a call has ended
  /// because of it; empty if none reported a failure.
  virtual std::string failure() = 0;

  /// What keeps the memory of the parameters alive, besides their tensors.
  virtual std::shared_ptr<const void> memory() const = 0;
};

/// A collective. Adds to the plan what the backend needs; borrows it and the
/// device. `deadline`: that of every wait in a step. `other`: the connection of
/// another plan of the same parameters, with the same backend; this one uses
/// its memory for the parameters. Throws InputError for Shm if the ranks are on
/// more than one host.
std::unique_ptr<Connection> makeConnection(Backend backend, plan::Plan &plan,
                                           Rendezvous &rendezvous,
                                           Device &device,
                                           std::chrono::milliseconds deadline,
                                           const Connection *other);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_LAUNCH_CONNECTION_H
