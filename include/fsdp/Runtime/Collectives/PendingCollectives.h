//===- PendingCollectives.h - collectives that may have hung --------------===//
#ifndef FSDP_RUNTIME_COLLECTIVES_PENDINGCOLLECTIVES_H
#define FSDP_RUNTIME_COLLECTIVES_PENDINGCOLLECTIVES_H

#include "fsdp/Runtime/Collectives/LateRanks.h"

#include <chrono>
#include <deque>
#include <functional>
#include <optional>

namespace fsdp::runtime {

/// The collectives of a communicator that are in flight on a device, in the
/// order in which it executes them. Not thread-safe.
class PendingCollectives {
public:
  using Clock = std::chrono::steady_clock;

  /// `done` is called until it returns true, and never again after that.
  void add(CollectiveName collective, std::function<bool()> done,
           Clock::time_point now);
  /// Drops what is done. Returns the collective that the device is executing,
  /// if it has been for `timeout`: since it was added, or since the one before
  /// it was seen done.
  std::optional<CollectiveName> overdue(Clock::time_point now,
                                        std::chrono::milliseconds timeout);
  /// The last that was added, done or not; its number is 0 before.
  const CollectiveName &last() const { return lastAdded; }
  bool empty() const { return pending.empty(); }

private:
  struct Entry {
    CollectiveName collective;
    std::function<bool()> done;
    Clock::time_point since;
  };
  std::deque<Entry> pending;
  CollectiveName lastAdded;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_COLLECTIVES_PENDINGCOLLECTIVES_H
