//===- MemoryTimeline.h - a rank's memory over a simulated step -----------===//
#ifndef FSDP_SIMULATE_MEMORYTIMELINE_H
#define FSDP_SIMULATE_MEMORYTIMELINE_H

#include "fsdp/Plan/Memory.h"
#include "fsdp/Plan/Plan.h"
#include "fsdp/Simulate/Simulator.h"

#include <array>
#include <cstdint>
#include <vector>

namespace fsdp::simulate {

/// What a rank holds from `time` on, in bytes by plan::MemoryUse.
struct MemorySample {
  double time = 0; ///< seconds
  /// The position in the step that it shows.
  int32_t position = 0;
  plan::BytesByUse bytes = {};

  int64_t total() const;
};

/// The memory of a step on a rank, including what it keeps all the time. Memory
/// follows the list (plan::replayMemory): what is between two instructions of
/// the compute stream is shown where the first of them begins, by the position
/// with the most bytes. Only samples that differ are listed, by ascending time.
std::vector<MemorySample> memoryOverTime(const plan::Plan &plan,
                                         const Timeline &timeline,
                                         plan::MemoryModel model,
                                         int64_t rank = 0);

} // namespace fsdp::simulate

#endif // FSDP_SIMULATE_MEMORYTIMELINE_H
