//===- RankThreads.h - the ranks of a plan as threads of a test -----------===//
#ifndef FSDP_UNITTESTS_SUPPORT_RANKTHREADS_H
#define FSDP_UNITTESTS_SUPPORT_RANKTHREADS_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Devices/Device.h"
#include "fsdp/Runtime/Execution/Interpreter.h"
#include "fsdp/Runtime/Execution/StepTrace.h"

#include <cstdint>
#include <functional>
#include <memory>
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

struct RunSettings {
  int64_t steps = 3;
  runtime::StreamSettings streams = {};
  /// Of a rank, which then captures its steps; without one, the CPU.
  std::function<std::unique_ptr<runtime::Device>()> makeDevice = {};
  /// Of a rank: Executor::setStage.
  std::function<runtime::Interpreter::Stage(runtime::Comm &)> makeStage = {};
  /// Takes StepGraphs::describe() after each step, each rank on its thread.
  std::function<void(const std::string &)> takeGraphs = {};
  /// Takes the last step's times, each rank on its thread.
  std::function<void(const runtime::StepTrace &)> takeTrace = {};
};

/// Steps from the same initial values on synthetic data, of every rank. Needs
/// installSteeredAllocator.
std::vector<Outcome> runOverShm(const plan::Plan &plan,
                                const RunSettings &settings = {});
std::vector<Outcome> runOverGloo(plan::Plan plan,
                                 const RunSettings &settings = {});

} // namespace fsdp::test

#endif // FSDP_UNITTESTS_SUPPORT_RANKTHREADS_H
