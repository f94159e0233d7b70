//===- VerifyStagingTest.cpp - P39, broken --------------------------------===//
#include "Support/PlanMutations.h"

#include <algorithm>

namespace fsdp::test {
namespace {

using namespace plan;

Plan stagedPlan() {
  Plan plan = samplePlan(4);
  stageState(plan);
  return plan;
}

/// Moves an instruction to the end of the list, and to phase optimizer.
void moveToEnd(Plan &plan, size_t from) {
  Instruction instruction = take(plan, from);
  instruction.phase = Phase::Optimizer;
  instruction.when = When::Every;
  plan.instructions.push_back(std::move(instruction));
}

const std::vector<Mutation> kMutations = {
    {"Twice", "P39", [](Plan &p) { first<StageState>(p, 1).unit = 0; }},
    {"NotAllThatAreUpdated", "P39",
     [](Plan &p) {
       take(p, find<Wait>(p, 1));
       take(p, find<StageState>(p, 1));
     }},
    // The wait for the second is one for the first, of the same stream.
    {"NotAwaited", "P39", [](Plan &p) { take(p, find<Wait>(p, 1)); }},
    {"AfterTheUpdate", "P39",
     [](Plan &p) {
       moveToEnd(p, find<StageState>(p));
       moveToEnd(p, find<Wait>(p));
     }},
    {"AwaitedAfterTheUpdate", "P39",
     [](Plan &p) { moveToEnd(p, find<Wait>(p, 1)); }},
    {"UnknownUnit", "P1", [](Plan &p) { first<StageState>(p).unit = 2; }},
    {"OnAnotherStream", "P26",
     [](Plan &p) {
       p.instructions[find<StageState>(p)].stream = Stream::AllGather;
     }},
};

class StagingMutations : public testing::TestWithParam<Mutation> {};

TEST_P(StagingMutations, AreCaught) {
  Plan plan = stagedPlan();
  verifyPlan(plan, "p.json");
  GetParam().apply(plan);
  expectCaught(plan, GetParam().label);
}

INSTANTIATE_TEST_SUITE_P(All, StagingMutations, testing::ValuesIn(kMutations),
                         [](const auto &info) { return info.param.name; });

TEST(VerifyStaging, IsOfTheFirstMicrobatch) {
  Plan plan = samplePlan(4);
  accumulateWhole(plan);
  stageState(plan);
  EXPECT_NO_THROW(verifyPlan(plan, "p.json"));
  // The event of a later microbatch says nothing of the copy in the first.
  for (int wait : {1, 0})
    moveToEnd(plan, find<Wait>(plan, wait));
  expectCaught(plan, "P39");
}

TEST(VerifyStaging, RoundTrips) {
  Plan once = samplePlan(4);
  accumulateWhole(once);
  stageState(once); // in the first microbatch, as its waits are
  for (const Plan &plan : {stagedPlan(), once})
    EXPECT_EQ(printPlan(parsePlan(printPlan(plan), "p.json")), printPlan(plan));
}

} // namespace
} // namespace fsdp::test
