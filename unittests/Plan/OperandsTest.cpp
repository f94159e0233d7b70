//===- OperandsTest.cpp - what instructions take, and where ---------------===//
#include "fsdp/Plan/Operands.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

namespace fsdp::test {
namespace {

using namespace plan;

/// One unit of three is offloaded; gradients of all are summed together.
TEST(Operands, GradientsOnTheHostAreComputedWithThere) {
  Plan plan =
      readPlan(std::string(FSDP_TEST_INPUTS) + "/plans/llama-offload-2.json");
  std::vector<bool> onHost = computesOnHost(plan);
  ASSERT_EQ(onHost.size(), plan.instructions.size());
  std::multiset<size_t> kinds;
  for (size_t i = 0; i < onHost.size(); ++i)
    if (onHost[i])
      kinds.insert(plan.instructions[i].kind.index());
  auto indexOf = [](const decltype(Instruction::kind) &kind) {
    return kind.index();
  };
  EXPECT_EQ(kinds, (std::multiset<size_t>{
                       indexOf(Accumulate{}), indexOf(Unscale{}),
                       indexOf(ClipGradNorm{}), indexOf(OptimizerStep{})}));
}

/// What comes back is the device's.
TEST(Operands, OffloadedActivationsAreNot) {
  Plan plan = readPlan(std::string(FSDP_TEST_INPUTS) +
                       "/plans/llama-activations-2.json");
  EXPECT_THAT(computesOnHost(plan), testing::Each(false));
}

} // namespace
} // namespace fsdp::test
