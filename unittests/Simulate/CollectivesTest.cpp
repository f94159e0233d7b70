//===- CollectivesTest.cpp - where collectives stand in plans -------------===//
#include "fsdp/Simulate/Collectives.h"
#include "Support/SamplePlan.h"
#include "fsdp/Plan/Operands.h"
#include "fsdp/Simulate/CostModel.h"
#include "fsdp/Simulate/DiffPlans.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

namespace fsdp::test {
namespace {

using namespace plan;
using namespace simulate;

Plan streamedPlan(int64_t replicas = 1) {
  Plan plan = samplePlan(4, false, replicas);
  beginCollectives(plan);
  return plan;
}

TEST(Collectives, StandWhereThePlanHasThem) {
  Plan plan = streamedPlan(2);
  std::vector<CollectiveUse> uses = findCollectives(plan);
  ASSERT_FALSE(uses.empty());
  for (const CollectiveUse &use : uses) {
    const Instruction &instruction = plan.instructions[size_t(use.instruction)];
    EXPECT_EQ(use.kind, instruction.stream);
    // beginCollectives puts the wait right behind.
    EXPECT_EQ(use.wait, use.instruction + 1);
    EXPECT_THAT(plan.instructions[size_t(use.wait)].waits,
                testing::Contains(instruction.records));
    EXPECT_EQ(use.callsToWait, 0);
    EXPECT_TRUE(use.use == -1 || use.use > use.wait);
  }
  // Of the root's w2, b and scale, padded to 8 x 5, 6 and 2 elements, one of
  // two shards is another rank's.
  EXPECT_EQ(uses.front().unit, plan.params.back().unit);
  EXPECT_EQ(uses.front().bytes, (8 * 5 + 6 + 2) * 4 / 2);
}

TEST(Collectives, HaveNoWaitOfTheirOwnOnTheComputeStream) {
  Plan plan = samplePlan(4);
  for (const CollectiveUse &use : findCollectives(plan))
    EXPECT_EQ(use.wait, use.instruction);
}

class Exposed
    : public testing::TestWithParam<std::tuple<const char *, const char *>> {};

/// What collectives are exposed by adds up to what the step is.
TEST_P(Exposed, AddsUp) {
  auto [name, deviceName] = GetParam();
  Plan plan =
      readPlan(FSDP_TEST_INPUTS "/plans/" + std::string(name) + ".json");
  DeviceModel device = loadDevice(deviceName);
  Timeline timeline = simulate::simulate(plan, costOf(plan, device), device);
  std::vector<CollectiveUse> uses = findCollectives(plan);
  StreamSeconds exposed = {};
  size_t executions = 0;
  for (const CollectiveTime &time :
       timeCollectives(plan, uses, timeline, device)) {
    const Span &span = timeline.spans[size_t(time.span)];
    exposed[size_t(plan::ownStream(
        plan.instructions[size_t(span.instruction)]))] += time.exposed;
    if (time.cause >= 0) {
      EXPECT_LE(timeline.spans[size_t(time.cause)].end, span.begin);
      EXPECT_NEAR(timeline.spans[size_t(time.cause)].end, span.begin, 1e-12);
    }
    EXPECT_TRUE(time.use < 0 || time.use >= span.end);
    ++executions;
  }
  for (size_t kind = 1; kind < kNumStreams; ++kind)
    EXPECT_NEAR(exposed[kind], timeline.exposed[kind], 1e-12);
  int64_t expected = std::accumulate(
      uses.begin(), uses.end(), int64_t(0),
      [](int64_t sum, const CollectiveUse &use) { return sum + use.times; });
  EXPECT_EQ(int64_t(executions), expected);
}

INSTANTIATE_TEST_SUITE_P(
    Compiled, Exposed,
    testing::Combine(testing::Values("llama-2", "llama-2-fsdp2", "llama-hsdp-4",
                                     "llama-microbatches-2"),
                     testing::Values("cpu", "h100")),
    [](const auto &info) {
      std::string name =
          std::string(std::get<0>(info.param)) + "_" + std::get<1>(info.param);
      std::replace(name.begin(), name.end(), '-', '_');
      return name;
    });

TEST(DiffPlans, SaysNothingOfEqualPlans) {
  EXPECT_EQ(printDifference(streamedPlan(), streamedPlan(), nullptr),
            "no difference\n");
}

TEST(DiffPlans, ShowsWhatHidesAGather) {
  Plan exposed = streamedPlan();
  Plan hidden = exposed;
  // A call more between the first gather's wait and its use.
  hidden.instructions.insert(
      hidden.instructions.begin() + long(find<Wait>(hidden)) + 1,
      {Call{{"aten::zeros", ""}, {}, {}}, Phase::Forward});
  std::string text = printDifference(exposed, hidden, nullptr);
  EXPECT_THAT(text,
              testing::HasSubstr("(root), all_gather 1: calls from launch "
                                 "to first use"));
  EXPECT_THAT(text, testing::Not(testing::HasSubstr("traffic")));
}

} // namespace
} // namespace fsdp::test
