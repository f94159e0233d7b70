//===- Collectives.h - where a plan's collectives are ---------------------===//
#ifndef FSDP_SIMULATE_COLLECTIVES_H
#define FSDP_SIMULATE_COLLECTIVES_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Simulate/DeviceModel.h"
#include "fsdp/Simulate/Simulator.h"

#include <cstdint>
#include <vector>

namespace fsdp::simulate {

/// A collective or a copy of a plan's step.
struct CollectiveUse {
  int32_t instruction = -1;
  plan::Stream kind = plan::Stream::AllGather;
  int32_t unit = -1;
  /// The bytes that one rank receives in a ring: (n-1)/n of the padded bytes,
  /// twice that in an all-reduce; for a copy, all bytes.
  int64_t bytes = 0;
  int64_t times = 1; ///< a step
  /// The first instruction of the compute stream that begins after it has
  /// ended; the collective itself if it is on the compute stream; -1 if there
  /// is none.
  int32_t wait = -1;
  /// The first instruction that reads a result; -1 if there is none.
  int32_t use = -1;
  /// Calls between the launch and the wait, or the first use, which can hide
  /// it.
  int32_t callsToWait = 0, callsToUse = 0;
};

/// In the order of the list.
std::vector<CollectiveUse> findCollectives(const plan::Plan &plan);

/// One execution of a collective, in a simulated step.
struct CollectiveTime {
  int32_t span = -1;
  /// Seconds in which compute waits for it, or performs it.
  double exposed = 0;
  /// The span at whose end it could begin; -1: it was the first of the step.
  int32_t cause = -1;
  /// The cause is the collective before it on its stream, otherwise an event.
  bool queued = false;
  /// Seconds from the beginning of the step to that of its first use; -1 if it
  /// has none.
  double use = -1;
};

/// The executions of `uses`, in the order of the timeline.
std::vector<CollectiveTime>
timeCollectives(const plan::Plan &plan, const std::vector<CollectiveUse> &uses,
                const Timeline &timeline, const DeviceModel &device);

} // namespace fsdp::simulate

#endif // FSDP_SIMULATE_COLLECTIVES_H
