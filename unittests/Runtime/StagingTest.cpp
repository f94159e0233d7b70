//===- StagingTest.cpp - copies of a checkpoint's state -------------------===//
//
// The copies of these tests are made as late as the plan lets them: when they
// are awaited.
//
//===----------------------------------------------------------------------===//
#include "Support/RankThreads.h"
#include "Support/SamplePlan.h"
#include "fsdp/Runtime/Devices/SteeredAllocator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <mutex>

namespace fsdp::test {
namespace {

using namespace runtime;

/// What the last step copied: of each rank, parameters by index.
using Staged = std::map<int64_t, std::map<int32_t, std::vector<float>>>;

class Staging : public testing::TestWithParam<const char *> {
protected:
  static void SetUpTestSuite() { installSteeredAllocator(); }

  static plan::Plan stagedPlan() {
    plan::Plan plan = compiledPlan(GetParam());
    stageState(plan);
    verifyPlan(plan, "plan");
    return plan;
  }

  RunSettings settings(const plan::Plan &plan, int64_t steps) {
    RunSettings settings;
    settings.steps = steps;
    settings.makeStage = [this, &plan](Comm &comm) -> Interpreter::Stage {
      return [this, &plan, &comm](int32_t unit) -> Interpreter::Wait {
        return [this, &plan, &comm, unit] {
          for (int32_t param : plan.units[size_t(unit)].params) {
            at::Tensor shard = comm.shard(param).contiguous();
            const float *data = shard.const_data_ptr<float>();
            std::lock_guard lock(mutex);
            staged[comm.rank()][param].assign(data, data + shard.numel());
            ++copies;
          }
        };
      };
    };
    return settings;
  }

  std::mutex mutex;
  Staged staged;
  size_t copies = 0;
};

TEST_P(Staging, CopiesWhatTheStepBeforeHasLeft) {
  plan::Plan plan = stagedPlan();
  std::vector<Outcome> before = runOverShm(plan, {.steps = 2});
  EXPECT_TRUE(staged.empty());
  std::vector<Outcome> after = runOverShm(plan, settings(plan, 3));
  EXPECT_EQ(after, runOverShm(plan, {.steps = 3}));
  for (size_t rank = 0; rank < before.size(); ++rank)
    for (size_t p = 0; p < plan.params.size(); ++p)
      EXPECT_EQ(staged[int64_t(rank)][int32_t(p)], before[rank].shards[p])
          << "rank " << rank << ", " << plan.params[p].name;
  // Once a step, however many microbatches it has.
  EXPECT_EQ(copies, 3 * before.size() * plan.params.size());
}

TEST_P(Staging, CopiesBesideOtherStreams) {
  plan::Plan plan = stagedPlan();
  std::vector<Outcome> before = runOverShm(plan, {.steps = 2});
  RunSettings threads = settings(plan, 3);
  threads.streams = {.maxDelayMicroseconds = 300};
  runOverShm(plan, threads);
  for (size_t rank = 0; rank < before.size(); ++rank)
    for (size_t p = 0; p < plan.params.size(); ++p)
      EXPECT_EQ(staged[int64_t(rank)][int32_t(p)], before[rank].shards[p])
          << "rank " << rank << ", " << plan.params[p].name;
}

INSTANTIATE_TEST_SUITE_P(Plans, Staging,
                         testing::Values("llama-2", "llama-hsdp-4",
                                         "llama-microbatches-2",
                                         "llama-offload-2"),
                         [](const auto &info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

} // namespace
} // namespace fsdp::test
