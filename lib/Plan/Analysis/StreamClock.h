//===- StreamClock.h - how far streams have certainly come ----------------===//
#ifndef FSDP_LIB_PLAN_ANALYSIS_STREAMCLOCK_H
#define FSDP_LIB_PLAN_ANALYSIS_STREAMCLOCK_H

#include "fsdp/Plan/Plan.h"

#include <algorithm>
#include <array>

namespace fsdp::plan {

/// A vector clock (Mattern 1989). Per stream: the position after the last
/// instruction that is complete.
using Clock = std::array<int64_t, kNumStreams>;

inline void join(Clock &clock, const Clock &other) {
  for (size_t s = 0; s < kNumStreams; ++s)
    clock[s] = std::max(clock[s], other[s]);
}

} // namespace fsdp::plan

#endif // FSDP_LIB_PLAN_ANALYSIS_STREAMCLOCK_H
