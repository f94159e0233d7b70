//===- StreamRaceTest.cpp - plans on threads, seen by ThreadSanitizer -----===//
//
// Ranks are threads of this process here, each with a thread for every stream,
// so that ThreadSanitizer sees all of them: what the plan's events order within
// a rank, and what the collectives order between ranks. Compiled plans run
// clean; a plan that has lost a wait, though it runs to the same bits more
// often than not, is reported.
//
//===----------------------------------------------------------------------===//
#include "Support/Fixtures.h"
#include "Support/SamplePlan.h"
#include "fsdp/Plan/Memory.h"
#include "fsdp/Runtime/DataSource.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Session.h"
#include "fsdp/Runtime/ShmComm.h"
#include "fsdp/Runtime/SteeredAllocator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/randn.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <exception>
#include <thread>

namespace fsdp::test {
namespace {

using namespace runtime;

constexpr int64_t kSteps = 3;

/// What one rank ends with.
struct Outcome {
  std::vector<double> losses;
  std::vector<std::vector<float>> shards;

  bool operator==(const Outcome &) const = default;
};

Outcome runRank(const plan::Plan &plan, ShmSegment &segment, int64_t rank,
                const StreamSettings &streams) {
  c10::InferenceMode guard;
  at::set_num_threads(1);
  std::unique_ptr<Device> device = makeCpuDevice();
  ShmComm comm(plan, segment, rank, streams.maxDelayMicroseconds.has_value());
  Session session(plan, comm, *device, segment.state(rank).position, {},
                  streams);
  for (size_t p = 0; p < plan.params.size(); ++p) {
    at::Generator generator = at::detail::createCPUGenerator(p + 1);
    at::Tensor whole =
        at::randn(plan.params[p].spec.shape, generator, at::kFloat);
    session.setParam(int32_t(p), whole.mul_(0.1));
  }
  for (at::Tensor buffer : session.buffers())
    buffer.fill_(0.5);
  session.start();
  Outcome outcome;
  for (int64_t step = 0; step < kSteps; ++step) {
    auto inputs = [&](int64_t microbatch) {
      return stepInputs(plan, nullptr, 1,
                        step * plan.accumulationSteps + microbatch, rank);
    };
    outcome.losses.push_back(session.step(inputs).loss);
  }
  session.quiesce();
  for (size_t p = 0; p < plan.params.size(); ++p) {
    at::Tensor shard = session.comm().shard(int32_t(p)).contiguous();
    const float *data = shard.const_data_ptr<float>();
    outcome.shards.emplace_back(data, data + shard.numel());
  }
  session.quiesce();
  return outcome;
}

std::vector<Outcome> run(const plan::Plan &plan,
                         const StreamSettings &streams) {
  ShmSegment segment(plan);
  std::vector<Outcome> outcomes(size_t(plan.worldSize));
  std::vector<std::exception_ptr> errors(outcomes.size());
  std::vector<std::thread> ranks;
  for (int64_t rank = 0; rank < plan.worldSize; ++rank)
    ranks.emplace_back([&, rank] {
      try {
        outcomes[size_t(rank)] = runRank(plan, segment, rank, streams);
      } catch (...) {
        errors[size_t(rank)] = std::current_exception();
        segment.abort();
      }
    });
  for (std::thread &rank : ranks)
    rank.join();
  for (const std::exception_ptr &error : errors)
    if (error)
      std::rethrow_exception(error);
  return outcomes;
}

plan::Plan compiled(const std::string &name) {
  return plan::readPlan(std::string(FSDP_TEST_INPUTS) + "/plans/" + name +
                        ".json");
}

class StreamRaces : public testing::TestWithParam<const char *> {
protected:
  static void SetUpTestSuite() { installSteeredAllocator(); }
};

TEST_P(StreamRaces, NoneInACompiledPlan) {
  plan::Plan plan = compiled(GetParam());
  std::vector<Outcome> serial = run(plan, {});
  EXPECT_EQ(run(plan, {.maxDelayMicroseconds = 0}), serial);
  for (uint64_t seed = 0; seed < plan::kNumStreams; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    EXPECT_EQ(run(plan, {.maxDelayMicroseconds = 300, .seed = seed}), serial);
  }
}

INSTANTIATE_TEST_SUITE_P(Plans, StreamRaces,
                         testing::Values("llama-2", "llama-2-fsdp2",
                                         "llama-hsdp-4", "llama-microbatches-2",
                                         "llama-activations-2"));

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
  auto mutants = withoutWaits(compiled("llama-2"));
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
            run(mutant, {.maxDelayMicroseconds = 1000, .seed = 0});
            run(mutant, {.maxDelayMicroseconds = 50000, .seed = 1});
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
