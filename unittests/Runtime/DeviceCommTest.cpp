//===- DeviceCommTest.cpp - compiled plans over communicators -------------===//
#include "Support/RankThreads.h"
#include "fsdp/Plan/Memory.h"
#include "fsdp/Runtime/Devices/SteeredAllocator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp::test {
namespace {

class DeviceComm : public testing::TestWithParam<const char *> {
protected:
  static void SetUpTestSuite() { runtime::installSteeredAllocator(); }
};

/// Sums of two have one value, whoever adds them.
TEST_P(DeviceComm, HasTheBitsOfSharedMemory) {
  plan::Plan plan = compiledPlan(GetParam());
  ASSERT_LE(plan.shards(), 2);
  EXPECT_EQ(runOverGloo(plan), runOverShm(plan));
}

/// Gathered parameters in the arena, where the next gather overwrites them.
TEST_P(DeviceComm, HasThemInTheArenaOfADevice) {
  plan::Plan plan = compiledPlan(GetParam());
  plan::layOutArena(plan, plan::MemoryModel::Device);
  plan::verifyPlan(plan, "plan");
  EXPECT_EQ(runOverGloo(plan), runOverShm(compiledPlan(GetParam())));
}

TEST_P(DeviceComm, HasThemOnThreads) {
  plan::Plan plan = compiledPlan(GetParam());
  std::vector<Outcome> serial = runOverShm(plan);
  for (uint64_t seed = 0; seed < plan::kNumStreams; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    EXPECT_EQ(runOverGloo(plan, {.streams = {.maxDelayMicroseconds = 300,
                                             .seed = seed}}),
              serial);
  }
}

INSTANTIATE_TEST_SUITE_P(Plans, DeviceComm,
                         testing::Values("llama-2", "llama-2-fsdp2",
                                         "llama-hsdp-4", "llama-microbatches-2",
                                         "llama-activations-2",
                                         "llama-offload-2",
                                         "llama-offload-microbatches-2"));

} // namespace
} // namespace fsdp::test
