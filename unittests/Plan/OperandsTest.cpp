//===- OperandsTest.cpp - what instructions take, and where ---------------===//
#include "fsdp/Plan/Operands.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

namespace fsdp::test {
namespace {

using namespace plan;

/// One unit of three is offloaded, and clipped with the others; all are, and
/// summed.
TEST(Operands, GradientsOnTheHostAreComputedWithThere) {
  auto indexOf = [](const decltype(Instruction::kind) &kind) {
    return kind.index();
  };
  using Kinds = std::multiset<size_t>;
  std::pair<const char *, Kinds> cases[] = {
      {"llama-offload-2", Kinds{indexOf(Unscale{}), indexOf(ClipGradNorm{}),
                                indexOf(OptimizerStep{})}},
      {"llama-offload-microbatches-2",
       Kinds{indexOf(Accumulate{}), indexOf(OptimizerStep{})}}};
  for (const auto &[name, expected] : cases) {
    Plan plan =
        readPlan(std::string(FSDP_TEST_INPUTS) + "/plans/" + name + ".json");
    std::vector<bool> onHost = computesOnHost(plan);
    ASSERT_EQ(onHost.size(), plan.instructions.size());
    Kinds kinds;
    for (size_t i = 0; i < onHost.size(); ++i)
      if (onHost[i])
        kinds.insert(plan.instructions[i].kind.index());
    EXPECT_EQ(kinds, expected) << name;
  }
}

/// What comes back is the device's.
TEST(Operands, OffloadedActivationsAreNot) {
  Plan plan = readPlan(std::string(FSDP_TEST_INPUTS) +
                       "/plans/llama-activations-2.json");
  EXPECT_THAT(computesOnHost(plan), testing::Each(false));
}

} // namespace
} // namespace fsdp::test
