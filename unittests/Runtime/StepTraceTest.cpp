//===- StepTraceTest.cpp - begin and end of a step's instructions ---------===//
#include "fsdp/Runtime/Execution/StepTrace.h"
#include "Support/Fixtures.h"
#include "Support/HostProxy.h"
#include "Support/RankThreads.h"
#include "Support/SamplePlan.h"
#include "fsdp/Plan/Profile.h"
#include "fsdp/Runtime/Devices/SteeredAllocator.h"
#include "fsdp/Runtime/Files/SafeTensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <map>
#include <mutex>

namespace fsdp::test {
namespace {

using namespace runtime;
using plan::MeasuredStep;
using plan::Span;
using plan::Stream;
using testing::HasSubstr;

/// A device of which the test says what time it is.
class ClockDevice : public HostProxy {
public:
  std::unique_ptr<Timer> makeTimer(size_t count) override {
    struct ClockTimer : Timer {
      ClockDevice &device;
      double zero = 0;
      std::vector<double> marks;
      ClockTimer(ClockDevice &device, size_t count)
          : device(device), marks(count, -1) {}
      void start() override { zero = device.now; }
      void mark(size_t index) override { marks.at(index) = device.now; }
      double seconds(size_t index) const override {
        return marks.at(index) - zero;
      }
    };
    return std::make_unique<ClockTimer>(*this, count);
  }
  void synchronize() override { ++waits; }

  double now = 0;
  int waits = 0;
};

class StepTraceTest : public testing::Test {
protected:
  void add(Stream stream, plan::Phase phase = plan::Phase::Forward) {
    plan.instructions.push_back({plan::Constant{}});
    plan.instructions.back().stream = stream;
    plan.instructions.back().phase = phase;
  }
  void begin(StepTrace &trace, double time, int64_t m, size_t instruction) {
    device.now = time;
    trace.begin(m, instruction);
  }
  void end(StepTrace &trace, double time, int64_t m, size_t instruction) {
    device.now = time;
    trace.end(m, instruction);
  }
  static std::vector<std::array<double, 4>>
  rows(const std::vector<Span> &spans) {
    std::vector<std::array<double, 4>> rows;
    for (const Span &span : spans)
      rows.push_back({double(span.instruction), double(span.microbatch),
                      span.begin, span.end});
    return rows;
  }

  plan::Plan plan;
  ClockDevice device;
};

TEST_F(StepTraceTest, CountsFromTheBeginningOfTheStep) {
  add(Stream::Compute);
  add(Stream::Compute, plan::Phase::Optimizer);
  plan.accumulationSteps = 2;
  StepTrace trace(plan, device);
  for (double start : {100.0, 200.0}) { // of two steps, the last
    device.now = start;
    trace.beginStep();
    for (int64_t m : {0, 1}) {
      begin(trace, start + 1 + 3 * double(m), m, 0);
      end(trace, start + 2 + 3 * double(m), m, 0);
    }
    begin(trace, start + 6, 1, 1);
    end(trace, start + 8, 1, 1);
    device.now = start + 9;
    trace.endStep();
  }
  EXPECT_EQ(trace.seconds(), 9);
  using Rows = std::vector<std::array<double, 4>>;
  EXPECT_EQ(rows(trace.spans()),
            (Rows{{0, 0, 1, 2}, {0, 1, 4, 5}, {1, 1, 6, 8}}));
  EXPECT_GE(device.waits, 4); // for the device, where steps begin and end
}

TEST_F(StepTraceTest, CollectivesOfAStreamFollowEachOther) {
  add(Stream::AllGather);
  add(Stream::AllGather);
  add(Stream::Compute);
  add(Stream::ReduceScatter);
  StepTrace trace(plan, device);
  trace.beginStep();
  begin(trace, 1, 0, 0);
  begin(trace, 2, 0, 1); // before the first has ended
  begin(trace, 3, 0, 2);
  begin(trace, 4, 0, 3);
  end(trace, 5, 0, 0);
  end(trace, 6, 0, 2);
  end(trace, 7, 0, 1);
  end(trace, 8, 0, 3);
  trace.endStep();
  using Rows = std::vector<std::array<double, 4>>;
  EXPECT_EQ(rows(trace.spans()),
            (Rows{{0, 0, 1, 5}, {1, 0, 5, 7}, {2, 0, 3, 6}, {3, 0, 4, 8}}));
}

/// That spans follow stream order and events, and end within the step.
void expectInOrder(const plan::Plan &plan, const std::vector<Span> &spans,
                   double seconds, double tolerance = 0) {
  std::array<double, plan::kNumStreams> ended = {};
  std::map<plan::EventId, double> complete;
  for (const Span &span : spans) {
    const plan::Instruction &instruction =
        plan.instructions[size_t(span.instruction)];
    SCOPED_TRACE("instruction " + std::to_string(span.instruction) + ", " +
                 plan::signature(plan, instruction));
    double &before = ended[size_t(instruction.stream)];
    EXPECT_GE(span.begin, before - tolerance);
    EXPECT_GE(span.end, span.begin);
    EXPECT_LE(span.end, seconds + tolerance);
    for (plan::EventId event : instruction.waits)
      EXPECT_GE(span.begin, complete[event] - tolerance);
    if (instruction.records != -1)
      complete[instruction.records] = span.end;
    before = span.end;
  }
  EXPECT_GT(seconds, 0);
}

/// Compiled plans, ranks being threads, for ThreadSanitizer too.
class StreamTimes : public testing::TestWithParam<const char *> {
protected:
  static void SetUpTestSuite() { installSteeredAllocator(); }
};

TEST_P(StreamTimes, FollowTheEventsOfThePlan) {
  plan::Plan plan = compiledPlan(GetParam());
  std::vector<Outcome> untraced = runOverShm(plan);
  std::mutex lock;
  int64_t ranks = 0;
  RunSettings settings;
  settings.takeTrace = [&](const StepTrace &trace) {
    std::lock_guard guard(lock);
    expectInOrder(plan, trace.spans(), trace.seconds());
    ++ranks;
  };
  EXPECT_EQ(runOverShm(plan, settings), untraced);
  settings.streams = {.maxDelayMicroseconds = 300, .seed = 1};
  EXPECT_EQ(runOverShm(plan, settings), untraced);
  EXPECT_EQ(ranks, 2 * plan.worldSize);
}

INSTANTIATE_TEST_SUITE_P(Plans, StreamTimes,
                         testing::Values("llama-2", "llama-hsdp-4",
                                         "llama-microbatches-2",
                                         "llama-activations-2"));

/// Runs fsdp-run on the sample plan with collectives beside the compute stream.
class FsdpRunTrace : public testing::TestWithParam<std::vector<std::string>> {
protected:
  FsdpRunTrace() : plan(samplePlan(2)) {
    beginCollectives(plan);
    writeSample(dir, plan);
  }

  ScratchDir dir;
  plan::Plan plan;
};

TEST_P(FsdpRunTrace, HasWhatTheLastStepExecuted) {
  std::vector<std::string> args = {dir / "plan.json", "--steps", "4", "--trace",
                                   dir / "trace.json"};
  args.insert(args.end(), GetParam().begin(), GetParam().end());
  ToolResult result = runTool(args);
  ASSERT_EQ(result.status, 0) << result.err;
  MeasuredStep step = plan::readMeasuredStep(
      dir / "trace.json", plan, hashBytes(readText(dir / "plan.json")));
  EXPECT_EQ(step.step, 4);
  ASSERT_EQ(step.ranks.size(), 2u);
  for (const MeasuredStep::Rank &rank : step.ranks)
    // The file has nanoseconds.
    expectInOrder(plan, rank.spans, rank.seconds, 1e-9);
  // Nothing of the ranks is left.
  EXPECT_FALSE(std::filesystem::exists(dir / "trace.json.rank0"));
  EXPECT_FALSE(std::filesystem::exists(dir / "trace.json.rank1"));
}

INSTANTIATE_TEST_SUITE_P(
    Ways, FsdpRunTrace,
    testing::Values(std::vector<std::string>{},
                    std::vector<std::string>{"--streams", "threads",
                                             "--max-stream-delay", "2000",
                                             "--seed", "1"},
                    std::vector<std::string>{"--comm", "gloo"}));

TEST(FsdpRunTraceInput, IsRefusedWhereNoneCanBe) {
  ScratchDir dir;
  writeSample(dir, samplePlan(2));
  auto refused = [&](std::vector<std::string> args) {
    args.insert(args.begin(), dir / "plan.json");
    ToolResult result = runTool(args);
    EXPECT_EQ(result.status, 2);
    return result.err;
  };
  std::string file = dir / "trace.json";
  EXPECT_THAT(refused({"--steps", "2", "--trace", file}),
              HasSubstr("--trace: expected --steps of at least 3, got 2"));
  EXPECT_THAT(refused({"--steps", "3", "--trace", dir / "no/such/file"}),
              HasSubstr("no/such/file: cannot write: No such file"));
  EXPECT_THAT(refused({"--steps", "3", "--trace", file, "--profile",
                       dir / "profile.json"}),
              HasSubstr("--trace: expected no --profile"));
  EXPECT_THAT(refused({"--steps", "5", "--trace", file, "--device", "cuda",
                       "--cuda-graphs"}),
              HasSubstr("--cuda-graphs: expected --device cuda, no --profile "
                        "and no --trace"));
}

} // namespace
} // namespace fsdp::test
