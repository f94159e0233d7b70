//===- RankThreads.h - the ranks of a plan as threads of a test -----------===//
#ifndef FSDP_UNITTESTS_SUPPORT_RANKTHREADS_H
#define FSDP_UNITTESTS_SUPPORT_RANKTHREADS_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Streams.h"

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::test {

/// What one rank ends with.
struct Outcome {
  std::vector<double> losses;
  std::vector<std::vector<float>> shards;

  bool operator==(const Outcome &) const = default;
};

/// The plan test/Inputs/plans/<name>.json.
plan::Plan compiledPlan(const std::string &name);

/// Three steps from the same initial values on synthetic data, of every rank.
/// Needs installSteeredAllocator.
std::vector<Outcome> runOverShm(const plan::Plan &plan,
                                const runtime::StreamSettings &streams = {});
std::vector<Outcome> runOverGloo(const plan::Plan &plan,
                                 const runtime::StreamSettings &streams = {});

} // namespace fsdp::test

#endif // FSDP_UNITTESTS_SUPPORT_RANKTHREADS_H
