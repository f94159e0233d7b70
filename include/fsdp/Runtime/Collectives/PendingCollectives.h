//===- PendingCollectives.h - collectives that may have hung --------------===//
#ifndef FSDP_RUNTIME_COLLECTIVES_PENDINGCOLLECTIVES_H
#define FSDP_RUNTIME_COLLECTIVES_PENDINGCOLLECTIVES_H

#include "fsdp/Runtime/Collectives/LateRanks.h"

#include <chrono>
#include <deque>
#include <functional>
#include <optional>

namespace fsdp::runtime {

/// Those of a communicator that a device has been given and not finished, in
/// the order in which it does. Not for several threads at once.
class PendingCollectives {
public:
  using Clock = std::chrono::steady_clock;

  /// `done` is asked until it says so once, and not from then on.
  void add(CollectiveName collective, std::function<bool()> done,
           Clock::time_point now);
  /// Drops what is done. Returns the one that the device is at, if it has been
  /// for `timeout`: since it was added, or since the one before it was seen
  /// done.
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
