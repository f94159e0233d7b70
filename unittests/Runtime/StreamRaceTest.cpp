//===- StreamRaceTest.cpp - plans on threads, seen by ThreadSanitizer -----===//
//
// Ranks are threads of this process here, each with a thread for every stream,
// so that ThreadSanitizer sees all of them: what the plan's events order within
// a rank, and what the collectives order between ranks. Compiled plans run
// clean; a plan that has lost a wait, though it runs to the same bits more
// often than not, is reported.
//
//===----------------------------------------------------------------------===//
#include "Support/RankThreads.h"
#include "fsdp/Runtime/Devices/SteeredAllocator.h"
#include "fsdp/Runtime/Error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

namespace fsdp::test {
namespace {

using namespace runtime;

class StreamRaces : public testing::TestWithParam<const char *> {
protected:
  static void SetUpTestSuite() { installSteeredAllocator(); }
};

TEST_P(StreamRaces, NoneInACompiledPlan) {
  plan::Plan plan = compiledPlan(GetParam());
  std::vector<Outcome> serial = runOverShm(plan);
  EXPECT_EQ(runOverShm(plan, {.streams = {.maxDelayMicroseconds = 0}}), serial);
  for (uint64_t seed = 0; seed < plan::kNumStreams; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    EXPECT_EQ(runOverShm(plan, {.streams = {.maxDelayMicroseconds = 300,
                                            .seed = seed}}),
              serial);
  }
}

INSTANTIATE_TEST_SUITE_P(Plans, StreamRaces,
                         testing::Values("llama-2", "llama-2-fsdp2",
                                         "llama-hsdp-4", "llama-microbatches-2",
                                         "llama-activations-2",
                                         "llama-offload-2",
                                         "llama-offload-microbatches-2"));

#ifdef FSDP_THREAD_SANITIZER
/// The plan without the waits of one instruction, for each where something is
/// then read that may not be written yet (P28). What is freed or gathered too
/// early does no harm here: gathers give out views, and the places of what is
/// reduced, in shared memory, are not given away before it is read.
std::vector<std::pair<size_t, plan::Plan>>
withoutWaits(const plan::Plan &original) {
  std::vector<std::pair<size_t, plan::Plan>> mutants;
  for (size_t i = 0; i < original.instructions.size(); ++i) {
    if (original.instructions[i].waits.empty())
      continue;
    plan::Plan mutant = original;
    mutant.instructions[i].waits.clear();
    try {
      plan::verifyPlan(mutant, "plan");
    } catch (const plan::PlanError &error) {
      if (std::string(error.what()).ends_with("(P28)"))
        mutants.emplace_back(i, std::move(mutant));
    }
  }
  return mutants;
}

TEST(StreamRacesDeathTest, AreNoticedWhereAWaitIsMissing) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  auto mutants = withoutWaits(compiledPlan("llama-2"));
  EXPECT_GE(mutants.size(), 6u);
  for (const auto &[position, mutant] : mutants) {
    SCOPED_TRACE("instruction " + std::to_string(position));
    // What an operand that is not there stops needs no race.
    EXPECT_EXIT(
        {
          installSteeredAllocator();
          try {
            // Computation late on one rank; then gathers on one, reductions on
            // the other, by more than what they may run beside.
            runOverShm(mutant,
                       {.streams = {.maxDelayMicroseconds = 1000, .seed = 0}});
            runOverShm(mutant,
                       {.streams = {.maxDelayMicroseconds = 50000, .seed = 1}});
          } catch (const RunError &) {
            std::exit(1);
          }
          std::exit(0);
        },
        [](int status) { return !testing::ExitedWithCode(0)(status); }, "");
  }
}
#else
TEST(StreamRacesDeathTest, AreNoticedWhereAWaitIsMissing) {
  GTEST_SKIP() << "needs ThreadSanitizer: preset tsan";
}
#endif

} // namespace
} // namespace fsdp::test
