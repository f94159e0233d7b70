//===- MemoryTimeline.cpp - a rank's memory over a simulated step ---------===//
#include "fsdp/Simulate/MemoryTimeline.h"

#include <algorithm>

namespace fsdp::simulate {

using namespace plan;

/// Bytes by use at each position of the step.
static std::vector<BytesByUse>
bytesAtPositions(const Plan &plan, MemoryModel model, int64_t rank) {
  Memory memory = replayMemory(plan, model);
  auto positions = size_t(memory.stepPositions);
  std::vector<BytesByUse> changes(positions + 1, BytesByUse{});
  for (const Storage &storage : memory.storages)
    for (const Life &life : storage.lives) {
      if (life.first >= memory.stepPositions)
        continue; // of the evaluation
      auto use = size_t(storage.use);
      changes[size_t(life.first)][use] += storage.bytes;
      changes[std::min(positions, size_t(life.last) + 1)][use] -= storage.bytes;
    }
  BytesByUse alive = staticBytes(plan, model, rank);
  for (BytesByUse &entry : changes) {
    for (size_t use = 0; use < kNumMemoryUses; ++use)
      alive[use] += entry[use];
    entry = alive;
  }
  changes.pop_back();
  return changes;
}

int64_t MemorySample::total() const { return sum(bytes); }

std::vector<MemorySample> memoryOverTime(const Plan &plan,
                                         const Timeline &timeline,
                                         MemoryModel model, int64_t rank) {
  std::vector<BytesByUse> atPosition = bytesAtPositions(plan, model, rank);
  std::vector<MemorySample> samples;
  double time = 0;
  for (const Span &span : timeline.spans) {
    if (plan.instructions[span.instruction].stream == Stream::Compute)
      time = std::max(time, span.begin);
    const BytesByUse &bytes = atPosition[span.instruction];
    if (samples.empty() || samples.back().time < time)
      samples.push_back({time, span.instruction, bytes});
    else if (sum(bytes) > samples.back().total())
      samples.back() = {samples.back().time, span.instruction, bytes};
  }
  auto same = [](const MemorySample &a, const MemorySample &b) {
    return a.bytes == b.bytes;
  };
  samples.erase(std::unique(samples.begin(), samples.end(), same),
                samples.end());
  return samples;
}

} // namespace fsdp::simulate
