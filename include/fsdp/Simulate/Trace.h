//===- Trace.h - a simulated step for chrome://tracing and Perfetto -------===//
#ifndef FSDP_SIMULATE_TRACE_H
#define FSDP_SIMULATE_TRACE_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Plan/TraceFile.h"
#include "fsdp/Simulate/MemoryTimeline.h"
#include "fsdp/Simulate/Simulator.h"

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::simulate {

/// The step of one rank.
struct RankTimeline {
  int64_t rank = 0;
  Timeline timeline;
  std::vector<MemorySample> memory;
  /// Of the same rank, if not null; borrowed.
  const plan::MeasuredStep::Rank *measured = nullptr;
};

/// In the form of plan::TraceWriter: one process per rank, with an event for
/// each instruction that takes time; beside it, a process with the measured
/// step, with the same time zero. Memory is a counter of each rank, in MiB by
/// use.
std::string printTrace(const plan::Plan &plan,
                       const std::vector<RankTimeline> &ranks);

} // namespace fsdp::simulate

#endif // FSDP_SIMULATE_TRACE_H
