//===- StepGraphsTest.cpp - what of a step is captured --------------------===//
#include "fsdp/Runtime/Execution/StepGraphs.h"
#include "Support/HostProxy.h"
#include "Support/RankThreads.h"
#include "fsdp/Runtime/Devices/SteeredAllocator.h"
#include "fsdp/Runtime/Error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string>

namespace fsdp::test {
namespace {

using namespace runtime;
using testing::HasSubstr;

/// Of all devices.
std::atomic<int> allReplays = 0;

/// What it captures it calls at each replay, as a GPU would execute it.
class ReplayingDevice : public HostProxy {
public:
  std::unique_ptr<DeviceGraph>
  capture(const std::function<void()> &work) override {
    struct Graph : DeviceGraph {
      std::function<void()> work;
      int &replays;
      Graph(std::function<void()> work, int &replays)
          : work(std::move(work)), replays(replays) {}
      void replay() override {
        ++replays;
        ++allReplays;
        work();
      }
    };
    ++captures;
    if (!refusal.empty())
      throw RunError(refusal);
    return std::make_unique<Graph>(work, replays);
  }

  int captures = 0, replays = 0;
  std::string refusal;
};

class StepGraphsTest : public testing::Test {
protected:
  /// Calls of `submit` in so many steps.
  int run(const plan::Plan &plan, int64_t steps) {
    StepGraphs graphs(plan, device);
    int calls = 0;
    for (int64_t step = 0; step < steps; ++step)
      for (int64_t m = 0; m < plan.accumulationSteps; ++m)
        for (StepGraphs::Segment *segment : graphs.segmentsOf(m))
          graphs.run(*segment, m, [&] { ++calls; }, [&] { ++restores; });
    description = graphs.describe();
    return calls;
  }

  ReplayingDevice device;
  std::string description;
  int restores = 0;
};

plan::Plan fused(const std::string &name) {
  plan::Plan plan = compiledPlan(name);
  plan.optimizer.fused = true;
  plan.lrSchedule.reset();
  return plan;
}

TEST_F(StepGraphsTest, CapturesAWholeStepOnce) {
  run(fused("llama-2"), StepGraphs::kWarmup);
  EXPECT_EQ(description, "whole step not captured yet");
  run(fused("llama-2"), StepGraphs::kWarmup + 4);
  EXPECT_EQ(description, "whole step captured");
  EXPECT_EQ(device.captures, 1);
  EXPECT_EQ(device.replays, 4);
}

TEST_F(StepGraphsTest, CapturesEachMicrobatch) {
  plan::Plan plan = fused("llama-microbatches-2");
  ASSERT_EQ(plan.accumulationSteps, 2);
  run(plan, StepGraphs::kWarmup + 2);
  EXPECT_EQ(device.captures, 2);
  EXPECT_EQ(device.replays, 4);
}

TEST_F(StepGraphsTest, LeavesOutAnOptimizerThatTheHostTakesPartIn) {
  plan::Plan plan = fused("llama-2");
  plan.lrSchedule.emplace();
  run(plan, StepGraphs::kWarmup + 1);
  EXPECT_EQ(description, "forward and backward captured; optimizer not "
                         "captured: the learning rate changes from step to "
                         "step");
  EXPECT_EQ(device.captures, 1);

  plan = fused("llama-2");
  plan.optimizer.fused = false;
  run(plan, 1);
  EXPECT_THAT(description, HasSubstr("without fused"));

  // Its fused kernels skip a step by themselves, but do not know which is the
  // first.
  plan = fused("llama-2");
  plan.gradScaler.emplace();
  run(plan, StepGraphs::kWarmup + 1);
  EXPECT_EQ(description, "whole step captured");
  plan.optimizer.name = "sgd";
  plan.optimizer.momentum = 0.9;
  run(plan, StepGraphs::kWarmup + 1);
  EXPECT_THAT(description, HasSubstr("gradient scaler"));
}

TEST_F(StepGraphsTest, LeavesOutWhatIsOnTheHost) {
  run(fused("llama-offload-2"), StepGraphs::kWarmup + 1);
  EXPECT_EQ(description, "forward and backward captured; optimizer not "
                         "captured: offloaded units are updated on the host");
  EXPECT_EQ(device.captures, 1);

  run(fused("llama-offload-microbatches-2"), StepGraphs::kWarmup + 1);
  EXPECT_THAT(description, HasSubstr("forward and backward not captured: "
                                     "gradients of offloaded units are summed "
                                     "on the host"));
  EXPECT_EQ(device.captures, 1);
}

TEST_F(StepGraphsTest, GoesOnWhereACaptureFails) {
  device.refusal = "operation not permitted when stream is capturing\nmore";
  EXPECT_EQ(run(fused("llama-2"), StepGraphs::kWarmup + 3),
            StepGraphs::kWarmup + 3);
  EXPECT_EQ(description, "whole step not captured: it cannot be captured: "
                         "operation not permitted when stream is capturing");
  EXPECT_EQ(device.captures, 1);
  EXPECT_EQ(restores, 1);
}

TEST_F(StepGraphsTest, CapturesNothingWhereOneMicrobatchCannotBe) {
  plan::Plan plan = fused("llama-microbatches-2");
  StepGraphs graphs(plan, device);
  std::vector<int> calls(2);
  for (int64_t step = 0; step < StepGraphs::kWarmup + 2; ++step)
    for (int64_t m = 0; m < 2; ++m) {
      device.refusal = m == 1 ? "no" : "";
      graphs.run(
          *graphs.segmentsOf(m).front(), m, [&] { ++calls[size_t(m)]; }, [] {});
    }
  // The first microbatch was replayed once, which calls here too.
  EXPECT_EQ(calls, (std::vector<int>{StepGraphs::kWarmup + 2,
                                     StepGraphs::kWarmup + 2}));
  EXPECT_EQ(device.replays, 1);
}

TEST_F(StepGraphsTest, GoesOnWhereTheDeviceHasNone) {
  std::unique_ptr<Device> cpu = makeCpuDevice();
  plan::Plan plan = fused("llama-2");
  StepGraphs graphs(plan, *cpu);
  int calls = 0;
  for (int64_t step = 0; step < 5; ++step)
    graphs.run(*graphs.segmentsOf(0).front(), 0, [&] { ++calls; }, [] {});
  EXPECT_EQ(calls, 5);
  EXPECT_EQ(graphs.describe(),
            "whole step not captured: the device has no graphs");
}

/// What the optimizer takes of the replayed segment lies where it always does.
TEST(StepGraphs, AreReplayedWhereGradientsGoToTheHost) {
  installSteeredAllocator();
  plan::Plan plan = compiledPlan("llama-offload-2");
  RunSettings settings;
  settings.steps = StepGraphs::kWarmup + 3;
  settings.makeDevice = [] { return std::make_unique<ReplayingDevice>(); };
  std::mutex lock;
  std::map<std::string, int> said;
  settings.takeGraphs = [&](const std::string &description) {
    std::lock_guard guard(lock);
    ++said[description];
  };
  allReplays = 0;
  runOverGloo(plan, settings);
  EXPECT_EQ(allReplays, 2 * 3);
  std::string optimizer =
      "; optimizer not captured: offloaded units are updated on the host";
  EXPECT_EQ(said, (std::map<std::string, int>{
                      {"forward and backward not captured yet" + optimizer,
                       2 * StepGraphs::kWarmup},
                      {"forward and backward captured" + optimizer, 2 * 3}}));
}

class ReplayedPlans : public testing::TestWithParam<const char *> {};

TEST_P(ReplayedPlans, HaveTheBitsOfSubmittedOnes) {
  installSteeredAllocator();
  for (bool isFused : {true, false}) {
    plan::Plan plan = compiledPlan(GetParam());
    plan.optimizer.fused = isFused;
    RunSettings settings;
    settings.steps = StepGraphs::kWarmup + 3;
    std::vector<Outcome> submitted = runOverShm(plan, settings);
    settings.makeDevice = [] { return std::make_unique<ReplayingDevice>(); };
    EXPECT_EQ(runOverShm(plan, settings), submitted);
    EXPECT_EQ(runOverGloo(plan, settings), submitted);
  }
}

INSTANTIATE_TEST_SUITE_P(Plans, ReplayedPlans,
                         testing::Values("llama-2", "llama-hsdp-4",
                                         "llama-microbatches-2",
                                         "llama-activations-2",
                                         "llama-offload-2"));

} // namespace
} // namespace fsdp::test
