//===- ProfilerTest.cpp - measured seconds of instructions ----------------===//
#include "fsdp/Runtime/Execution/Profiler.h"
#include "Support/Fixtures.h"
#include "Support/SamplePlan.h"
#include "fsdp/Plan/Profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <thread>

namespace fsdp::test {
namespace {

using runtime::Profiler;

void pass(Profiler &profiler, size_t instruction, int milliseconds) {
  profiler.begin();
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
  profiler.end(instruction);
}

TEST(Profiler, TakesMediansAfterTheWarmup) {
  plan::Plan plan;
  plan.instructions.resize(3);
  Profiler profiler(plan);
  // Seconds of waiting that only the first two steps have would show.
  for (int step = 0; step < 5; ++step) {
    pass(profiler, 0, step < 2 ? 60 : 2);
    pass(profiler, 1, 4); // in two microbatches
    pass(profiler, 1, 4);
    profiler.endStep(step < 2 ? 100 : 10);
  }
  std::vector<double> medians = profiler.medians();
  ASSERT_EQ(medians.size(), 4u);
  EXPECT_GE(medians[0], 0.002);
  EXPECT_GE(medians[1], 0.004); // once
  EXPECT_EQ(medians[2], 0);     // never ran
  // The step's 10 s are all accounted for.
  EXPECT_NEAR(medians[0] + 2 * medians[1] + medians[3], 10, 1e-5);
}

TEST(Profiler, FsdpRunWritesAProfileOfThePlan) {
  ScratchDir dir;
  plan::Plan plan = samplePlan(2);
  accumulateWhole(plan);
  writeSample(dir, plan);
  ToolResult result =
      runTool({dir / "plan.json", "--steps", "5", "--data",
               dir / "data.safetensors", "--profile", dir / "profile.json"});
  ASSERT_EQ(result.status, 0) << result.err;
  plan::Profile profile = plan::readProfile(dir / "profile.json");
  EXPECT_EQ(profile.worldSize, 2);
  EXPECT_EQ(profile.steps, 3);
  EXPECT_THAT(profile.planHash, testing::MatchesRegex("xxh3:[0-9a-f]{32}"));
  ASSERT_EQ(profile.instructions.size(), plan.instructions.size());
  for (size_t i = 0; i < plan.instructions.size(); ++i)
    EXPECT_EQ(profile.instructions[i].what,
              plan::signature(plan, plan.instructions[i]));
  // Without an arena, all that operators make is behind it.
  EXPECT_GT(profile.scratchBytes, 0);
  EXPECT_GT(profile.instructions[find<plan::Call>(plan)].seconds, 0);
  EXPECT_GT(profile.instructions[find<plan::OptimizerStep>(plan)].seconds, 0);
  // Nothing of the ranks is left.
  EXPECT_FALSE(std::filesystem::exists(dir / "profile.json.rank0"));
  EXPECT_FALSE(std::filesystem::exists(dir / "profile.json.rank1"));
}

TEST(Profiler, FsdpRunRefusesWhatItCannotProfile) {
  ScratchDir dir;
  writeSample(dir, samplePlan(2));
  auto refused = [&](const std::vector<std::string> &args) {
    ToolResult result = runTool(args);
    EXPECT_EQ(result.status, 2);
    return result.err;
  };
  EXPECT_THAT(
      refused({dir / "plan.json", "--steps", "2", "--profile",
               dir / "profile.json"}),
      testing::HasSubstr("--profile: expected --steps of at least 3, got 2"));
  EXPECT_THAT(refused({dir / "plan.json", "--steps", "3", "--profile",
                       dir / "no/such/file"}),
              testing::HasSubstr("no/such/file: cannot write: No such file"));
}

} // namespace
} // namespace fsdp::test
