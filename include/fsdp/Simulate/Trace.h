//===- Trace.h - a simulated step for chrome://tracing and Perfetto -------===//
#ifndef FSDP_SIMULATE_TRACE_H
#define FSDP_SIMULATE_TRACE_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Simulate/MemoryTimeline.h"
#include "fsdp/Simulate/Simulator.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace fsdp::simulate {

/// The step of one rank.
struct RankTimeline {
  int64_t rank = 0;
  Timeline timeline;
  std::vector<MemorySample> memory;
};

/// Chrome's JSON trace format: a process a rank, a thread a stream, an event
/// for each instruction that takes time, with its module, unit and shapes;
/// microseconds. Memory is a counter of each rank, in MiB by its use.
std::string printTrace(const plan::Plan &plan,
                       const std::vector<RankTimeline> &ranks);

} // namespace fsdp::simulate

#endif // FSDP_SIMULATE_TRACE_H
