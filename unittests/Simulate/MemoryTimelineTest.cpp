//===- MemoryTimelineTest.cpp - memory over a simulated step --------------===//
#include "fsdp/Simulate/MemoryTimeline.h"

#include "Support/SamplePlan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

using namespace fsdp;
using namespace fsdp::plan;
using namespace fsdp::simulate;

namespace {

/// Every instruction takes a second.
Timeline seconds(const Plan &plan) {
  StepCost cost;
  cost.instructions.assign(plan.instructions.size(), {1});
  return simulate::simulate(plan, cost, DeviceModel());
}

TEST(MemoryTimeline, ShowsWhatTheReplaySays) {
  for (MemoryModel model : {MemoryModel::SharedHost, MemoryModel::Device}) {
    Plan plan = test::samplePlan(2);
    Timeline timeline = seconds(plan);
    int64_t kept = 0;
    for (int64_t bytes : staticBytes(plan, model, 1))
      kept += bytes;
    std::vector<int64_t> live = replayMemory(plan, model).liveBytes();
    std::vector<MemorySample> samples =
        memoryOverTime(plan, timeline, model, 1);
    // Instruction i begins at second i.
    size_t next = 0;
    for (size_t i = 0; i < plan.instructions.size(); ++i) {
      if (next < samples.size() && samples[next].time == double(i))
        ++next;
      ASSERT_GT(next, 0u);
      EXPECT_EQ(samples[next - 1].total(), kept + live[i]) << i;
    }
    EXPECT_EQ(next, samples.size());
  }
}

TEST(MemoryTimeline, KeepsThePeakOfWhatTakesNoTime) {
  Plan plan = test::samplePlan(2);
  StepCost cost;
  cost.instructions.assign(plan.instructions.size(), {});
  std::vector<MemorySample> samples = memoryOverTime(
      plan, simulate::simulate(plan, cost, DeviceModel()), MemoryModel::Device);
  ASSERT_EQ(samples.size(), 1u);
  std::vector<int64_t> live =
      replayMemory(plan, MemoryModel::Device).liveBytes();
  int64_t peak = *std::max_element(live.begin(), live.end());
  for (int64_t bytes : staticBytes(plan, MemoryModel::Device))
    peak += bytes;
  EXPECT_EQ(samples[0].total(), peak);
}

TEST(MemoryTimeline, LeavesOutTheEvaluation) {
  Plan plan = test::samplePlan(2), with = plan;
  test::addEvaluation(with);
  auto peak = [](const Plan &of) {
    int64_t most = 0;
    for (const MemorySample &sample :
         memoryOverTime(of, seconds(of), MemoryModel::Device))
      most = std::max(most, sample.total());
    return most;
  };
  EXPECT_EQ(peak(plan), peak(with));
}

} // namespace
