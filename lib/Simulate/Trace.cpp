//===- Trace.cpp - a simulated step for chrome://tracing and Perfetto -----===//
#include "fsdp/Simulate/Trace.h"

namespace fsdp::simulate {

using namespace plan;

namespace {

/// What takes time.
std::vector<Span> eventsOf(const std::vector<Span> &spans) {
  std::vector<Span> result;
  for (const Span &span : spans)
    if (span.end > span.begin)
      result.push_back(span);
  return result;
}

} // namespace

std::string printTrace(const Plan &plan,
                       const std::vector<RankTimeline> &ranks) {
  TraceWriter writer(plan);
  for (const RankTimeline &rank : ranks) {
    int64_t pid = rank.measured ? 2 * rank.rank : rank.rank;
    std::string name = "rank " + std::to_string(rank.rank);
    writer.process(pid, rank.measured ? name + " planned" : name,
                   eventsOf(rank.timeline.spans));
    for (const MemorySample &sample : rank.memory) {
      std::vector<std::pair<std::string, double>> values;
      for (size_t use = 0; use < kNumMemoryUses; ++use)
        values.emplace_back(std::string(memoryUseName(MemoryUse(use))),
                            double(sample.bytes[use]) / double(1 << 20));
      writer.counter(pid, "memory, MiB", sample.time, values);
    }
    if (rank.measured)
      writer.process(pid + 1, name + " measured", rank.measured->spans);
  }
  return writer.finish();
}

} // namespace fsdp::simulate
