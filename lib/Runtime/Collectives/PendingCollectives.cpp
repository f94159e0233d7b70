//===- PendingCollectives.cpp - collectives that may have hung ------------===//
#include "fsdp/Runtime/Collectives/PendingCollectives.h"

#include <algorithm>
#include <utility>

namespace fsdp::runtime {

void PendingCollectives::add(CollectiveName collective,
                             std::function<bool()> done,
                             Clock::time_point now) {
  lastAdded = collective;
  pending.push_back({std::move(collective), std::move(done), now});
}

std::optional<CollectiveName>
PendingCollectives::overdue(Clock::time_point now,
                            std::chrono::milliseconds timeout) {
  while (!pending.empty() && pending.front().done()) {
    pending.pop_front();
    if (!pending.empty())
      pending.front().since = std::max(pending.front().since, now);
  }
  if (pending.empty() || now - pending.front().since < timeout)
    return std::nullopt;
  return pending.front().collective;
}

} // namespace fsdp::runtime
