//===- StreamsTest.cpp - streams of a rank, on one thread or several ------===//
#include "fsdp/Runtime/Devices/Streams.h"
#include "Support/Fixtures.h"
#include "Support/SamplePlan.h"
#include "fsdp/Plan/Memory.h"
#include "fsdp/Runtime/Error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

namespace fsdp::test {
namespace {

using namespace runtime;
using plan::Stream;
using testing::ElementsAre;
using testing::HasSubstr;

/// Notes in which order work ends.
class Log {
public:
  Streams::Work entry(int number) {
    return [this, number] {
      std::lock_guard guard(lock);
      numbers.push_back(number);
      return Streams::Wait();
    };
  }
  std::vector<int> numbers;

private:
  std::mutex lock;
};

Streams::Work slow(Streams::Work work) {
  return [work = std::move(work)] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    return work();
  };
}

TEST(ThreadStreams, RunsAStreamInOrder) {
  auto streams = makeThreadStreams({});
  Log log;
  for (int i = 0; i < 100; ++i)
    streams->submit(Stream::AllGather, {}, -1, log.entry(i));
  streams->synchronize();
  ASSERT_EQ(log.numbers.size(), 100u);
  EXPECT_TRUE(std::is_sorted(log.numbers.begin(), log.numbers.end()));
}

TEST(ThreadStreams, WaitsForEventsOfOtherStreams) {
  auto streams = makeThreadStreams({});
  Log log;
  streams->submit(Stream::AllGather, {}, 0, slow(log.entry(1)));
  streams->submit(Stream::Compute, {0}, 1, slow(log.entry(2)));
  streams->submit(Stream::ReduceScatter, {1}, -1, log.entry(3));
  streams->synchronize();
  EXPECT_THAT(log.numbers, ElementsAre(1, 2, 3));
}

TEST(ThreadStreams, RunsStreamsAtTheSameTime) {
  auto streams = makeThreadStreams({});
  std::atomic<bool> met = false;
  // Would never end if one stream waited for the other.
  streams->submit(Stream::Compute, {}, -1, [&] {
    met.wait(false);
    return Streams::Wait();
  });
  streams->submit(Stream::AllGather, {}, -1, [&] {
    met = true;
    met.notify_all();
    return Streams::Wait();
  });
  streams->synchronize();
  EXPECT_TRUE(met);
}

TEST(ThreadStreams, CompletesAnEventWithTheWaitThatWorkReturns) {
  auto streams = makeThreadStreams({});
  Log log;
  streams->submit(Stream::AllGather, {}, 0, [&]() -> Streams::Wait {
    return [&] { slow(log.entry(1))(); };
  });
  streams->submit(Stream::Compute, {0}, -1, log.entry(2));
  streams->synchronize();
  EXPECT_THAT(log.numbers, ElementsAre(1, 2));
}

TEST(ThreadStreams, TakesAnEventThatNobodyRecordsAsComplete) {
  auto streams = makeThreadStreams({});
  Log log;
  streams->submit(Stream::Compute, {7}, -1, log.entry(1));
  streams->synchronize();
  EXPECT_THAT(log.numbers, ElementsAre(1));
}

TEST(ThreadStreams, StopsAtTheFirstErrorAndCallsAbortOnce) {
  std::atomic<int> aborts = 0;
  ThreadStreamOptions options;
  options.abort = [&] { ++aborts; };
  auto streams = makeThreadStreams(options);
  Log log;
  auto fail = []() -> Streams::Wait { throw RunError("no such luck"); };
  streams->submit(Stream::Compute, {}, 0, fail);
  streams->submit(Stream::AllGather, {0}, -1, log.entry(1));
  streams->submit(Stream::Compute, {}, -1, fail);
  try {
    streams->synchronize();
    ADD_FAILURE() << "expected an error";
  } catch (const RunError &error) {
    EXPECT_STREQ(error.what(), "no such luck");
  }
  EXPECT_TRUE(log.numbers.empty());
  EXPECT_EQ(aborts, 1);
}

TEST(SerialStreams, BeginsACollectiveWhereItStandsAndWaitsWhereItsEventIs) {
  auto streams = makeSerialStreams();
  std::vector<std::string> log;
  auto note = [&](const char *what) {
    return [&log, what] {
      log.push_back(what);
      return Streams::Wait();
    };
  };
  streams->submit(Stream::AllGather, {}, 0, [&]() -> Streams::Wait {
    log.push_back("begin");
    return note("end");
  });
  streams->submit(Stream::Compute, {}, -1, note("compute"));
  streams->submit(Stream::Compute, {0}, -1, note("use"));
  streams->synchronize();
  EXPECT_THAT(log, ElementsAre("begin", "compute", "end", "use"));
}

/// fsdp-run's losses and weights.
class StreamsOfFsdpRun : public testing::Test {
protected:
  std::pair<std::vector<nlohmann::json>, std::string>
  run(const std::vector<std::string> &options) {
    std::vector<std::string> args = {dir / "plan.json",
                                     "--steps",
                                     "4",
                                     "--data",
                                     dir / "data.safetensors",
                                     "--metrics",
                                     dir / "m.jsonl",
                                     "--save-weights",
                                     dir / "w.safetensors"};
    args.insert(args.end(), options.begin(), options.end());
    ToolResult result = runTool(args);
    EXPECT_EQ(result.status, 0) << result.err;
    std::istringstream lines(readText(dir / "m.jsonl"));
    std::vector<nlohmann::json> losses;
    for (std::string line; std::getline(lines, line);)
      losses.push_back(nlohmann::json::parse(line)["rank_losses"]);
    return {losses, readText(dir / "w.safetensors")};
  }

  void expectSame(const plan::Plan &plan) {
    writeSample(dir, plan, 60);
    auto serial = run({});
    ASSERT_EQ(serial.first.size(), 4u);
    EXPECT_EQ(run({"--streams", "threads"}), serial);
    for (const char *seed : {"1", "2", "3"}) {
      SCOPED_TRACE(std::string("seed ") + seed);
      EXPECT_EQ(run({"--streams", "threads", "--max-stream-delay", "2000",
                     "--seed", seed}),
                serial);
    }
  }

  ScratchDir dir;
};

TEST_F(StreamsOfFsdpRun, GiveTheSameBitsOnThreads) {
  for (int64_t ranks : {1, 2, 3}) {
    plan::Plan plan = samplePlan(ranks, /*transposedGrad=*/ranks == 2);
    beginCollectives(plan);
    layOutArena(plan, plan::MemoryModel::SharedHost);
    expectSame(plan);
  }
}

TEST_F(StreamsOfFsdpRun, GiveTheSameBitsWithReplicas) {
  plan::Plan plan = samplePlan(4, false, /*replicas=*/2);
  beginCollectives(plan);
  expectSame(plan);
}

TEST_F(StreamsOfFsdpRun, EndWithTheErrorOfOneThread) {
  plan::Plan plan = samplePlan(2);
  beginCollectives(plan);
  writeSample(dir, plan, 60);
  std::string reduce = std::to_string(find<plan::ReduceScatter>(plan));
  ToolResult result =
      runTool({dir / "plan.json", "--steps", "4", "--streams", "threads",
               "--inject-fault", "1:2:" + reduce + ":throw"});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err, HasSubstr("rank 1: step 2: reduce_scatter of unit"));
  EXPECT_THAT(result.err, HasSubstr("injected fault"));
}

TEST_F(StreamsOfFsdpRun, AreNotProfiledOnThreads) {
  writeSample(dir, samplePlan(1));
  ToolResult result = runTool({dir / "plan.json", "--steps", "4", "--streams",
                               "threads", "--profile", dir / "p.json"});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err,
              HasSubstr("--profile: expected --streams serial, got threads"));
}

} // namespace
} // namespace fsdp::test
