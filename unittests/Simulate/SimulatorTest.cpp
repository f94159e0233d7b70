//===- SimulatorTest.cpp - streams and events in time ---------------------===//
#include "fsdp/Simulate/Simulator.h"

#include "Support/SamplePlan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

using namespace fsdp;
using namespace fsdp::plan;
using namespace fsdp::simulate;

namespace {

/// A plan of which only streams and events count, and its costs.
struct Program {
  Plan plan;
  StepCost cost;
  DeviceModel device;

  Instruction &add(Stream stream, double seconds,
                   Medium medium = Medium::None) {
    decltype(Instruction::kind) kind = Constant{};
    if (stream == Stream::AllGather)
      kind = AllGather{};
    else if (stream == Stream::ReduceScatter)
      kind = ReduceScatter{};
    else if (stream == Stream::AllReduce)
      kind = AllReduce{};
    plan.instructions.push_back({std::move(kind)});
    plan.instructions.back().stream = stream;
    cost.instructions.push_back({seconds, medium});
    return plan.instructions.back();
  }
  Timeline run() const { return simulate::simulate(plan, cost, device); }
};

TEST(Simulator, StreamsRunBesideEachOther) {
  Program p;
  p.add(Stream::AllGather, 3).records = 0;
  p.add(Stream::Compute, 2);
  p.add(Stream::Compute, 4).waits = {0};
  p.add(Stream::AllGather, 1).records = 1;
  p.add(Stream::Compute, 1).waits = {1};
  Timeline t = p.run();
  EXPECT_EQ(t.seconds, 8);
  EXPECT_EQ(t.spans[1].begin, 0);
  EXPECT_EQ(t.spans[2].begin, 3); // a second of waiting
  EXPECT_EQ(t.spans[3].begin, 3);
  EXPECT_EQ(t.spans[4].begin, 7);
  EXPECT_EQ(t.busy[size_t(Stream::Compute)], 7);
  EXPECT_EQ(t.busy[size_t(Stream::AllGather)], 4);
  EXPECT_EQ(t.exposed[size_t(Stream::AllGather)], 1);
  EXPECT_EQ(t.exposedCommunication(), 1);
}

TEST(Simulator, AStepThatDoesNotEndIsAnError) {
  Program p;
  p.device.name = "slow";
  p.add(Stream::Compute, 2e9);
  try {
    p.run();
    FAIL();
  } catch (const SimulateError &error) {
    EXPECT_STREQ(error.what(), "expected a step of at most 1e9 seconds, got "
                               "one of 2e+09 on device \"slow\"");
  }
}

TEST(Simulator, CollectivesOnTheComputeStreamAreExposed) {
  Program p;
  p.add(Stream::AllGather, 3).stream = Stream::Compute;
  p.add(Stream::Compute, 2);
  p.add(Stream::ReduceScatter, 5);
  Timeline t = p.run();
  EXPECT_EQ(t.seconds, 5);
  EXPECT_EQ(t.exposed[size_t(Stream::AllGather)], 3);
  EXPECT_EQ(t.exposed[size_t(Stream::ReduceScatter)], 0);
  // The end of the step waits for the reduction.
  p.cost.instructions[2].seconds = 9;
  EXPECT_EQ(p.run().exposed[size_t(Stream::ReduceScatter)], 4);
}

TEST(Simulator, AWaitCountsAsWhatItWaitsFor) {
  Program p;
  p.add(Stream::ReduceScatter, 3).records = 0;
  p.add(Stream::Compute, 2);
  p.add(Stream::Compute, 4).waits = {0};
  p.plan.instructions.back().kind = Wait{};
  Timeline t = p.run();
  EXPECT_EQ(t.seconds, 7);
  EXPECT_EQ(t.exposed[size_t(Stream::ReduceScatter)], 1 + 4);
  EXPECT_EQ(t.busy[size_t(Stream::Compute)], 2);
}

TEST(Simulator, ComputeIsSlowerBesideACollective) {
  Program p;
  p.device.collectiveSlowdown = 2;
  p.add(Stream::AllGather, 4, Medium::WithinHost);
  p.add(Stream::Compute, 5);
  Timeline t = p.run();
  // Four seconds at half rate, three at full.
  EXPECT_DOUBLE_EQ(t.seconds, 7);
  EXPECT_DOUBLE_EQ(t.slowdown, 2);
  // Copies to the host do not slow it.
  p.cost.instructions[0].medium = Medium::HostLink;
  EXPECT_DOUBLE_EQ(p.run().seconds, 5);
}

TEST(Simulator, CollectivesOverOneMediumShareIt) {
  Program p;
  p.add(Stream::AllGather, 2, Medium::WithinHost);
  p.add(Stream::ReduceScatter, 3, Medium::WithinHost);
  Timeline t = p.run();
  EXPECT_DOUBLE_EQ(t.spans[0].end, 4);
  EXPECT_DOUBLE_EQ(t.spans[1].end, 5);
  p.cost.instructions[1].medium = Medium::BetweenHosts;
  t = p.run();
  EXPECT_DOUBLE_EQ(t.spans[0].end, 2);
  EXPECT_DOUBLE_EQ(t.spans[1].end, 3);
}

TEST(Simulator, SerialStreamsFollowTheList) {
  Program p;
  p.device.serialStreams = true;
  p.add(Stream::AllGather, 3).records = 0;
  p.add(Stream::Compute, 2);
  p.add(Stream::Compute, 4).waits = {0};
  EXPECT_EQ(p.run().seconds, 9);
}

TEST(Simulator, OutsideSecondsAreAdded) {
  Program p;
  p.add(Stream::Compute, 2);
  p.cost.outsideSeconds = 0.5;
  EXPECT_EQ(p.run().seconds, 2.5);
}

TEST(Simulator, MicrobatchesRepeatForwardAndBackward) {
  Program p;
  p.plan.accumulationSteps = 3;
  p.add(Stream::AllGather, 1).when = When::First;
  p.plan.instructions.back().records = 0;
  p.add(Stream::Compute, 10).waits = {0};
  p.add(Stream::ReduceScatter, 4).when = When::Last;
  p.plan.instructions.back().records = 1;
  Instruction &update = p.add(Stream::Compute, 7);
  update.waits = {1};
  update.phase = Phase::Optimizer;
  Timeline t = p.run();
  // Gather once, three times compute; the reduction is issued in the last
  // microbatch alone, on a stream that is free.
  ASSERT_EQ(t.spans.size(), 6u);
  EXPECT_EQ(t.spans[3].microbatch, 2);
  EXPECT_EQ(t.spans[4].begin, 0); // waits for nothing
  EXPECT_EQ(t.seconds, 1 + 30 + 7);
}

TEST(Simulator, AnEventIsThatOfTheLastRecorder) {
  // In the second microbatch the wait is for the gather of that microbatch.
  Program p;
  p.plan.accumulationSteps = 2;
  p.add(Stream::AllGather, 4).records = 0;
  p.add(Stream::Compute, 1).waits = {0};
  Timeline t = p.run();
  EXPECT_EQ(t.spans[1].begin, 4);
  EXPECT_EQ(t.spans[3].begin, 8);
  // Before it was recorded, an event is complete.
  Program q;
  q.add(Stream::Compute, 1).waits = {0};
  q.add(Stream::AllGather, 4).records = 0;
  EXPECT_EQ(q.run().seconds, 4);
}

/// A random list: every wait is for an event recorded before.
Program randomProgram(std::mt19937 &random, bool media) {
  auto below = [&](int n) { return int(random() % unsigned(n)); };
  Program p;
  int events = 0;
  for (int i = 0, count = 2 + below(30); i < count; ++i) {
    auto stream = Stream(below(media ? 3 : int(kNumStreams)));
    Medium medium = media && stream != Stream::Compute
                        ? (below(2) ? Medium::WithinHost : Medium::BetweenHosts)
                        : Medium::None;
    Instruction &instruction = p.add(stream, below(8), medium);
    for (int k = below(3); k > 0 && events > 0; --k)
      instruction.waits.push_back(below(events));
    if (below(2))
      instruction.records = events++;
  }
  return p;
}

/// The longest path: without shared media an instruction ends its seconds after
/// the last of what it follows.
double longestPath(const Program &p) {
  double streams[kNumStreams] = {}, last = 0;
  std::vector<double> events(p.plan.instructions.size(), 0);
  for (size_t i = 0; i < p.plan.instructions.size(); ++i) {
    const Instruction &instruction = p.plan.instructions[i];
    double begin = streams[size_t(instruction.stream)];
    for (EventId event : instruction.waits)
      begin = std::max(begin, events[event]);
    double end = begin + p.cost.instructions[i].seconds;
    streams[size_t(instruction.stream)] = end;
    if (instruction.records >= 0)
      events[instruction.records] = end;
    last = std::max(last, end);
  }
  return last;
}

TEST(Simulator, EqualsTheLongestPathOnRandomPlans) {
  std::mt19937 random(7);
  for (int round = 0; round < 2000; ++round) {
    Program p = randomProgram(random, /*media=*/false);
    ASSERT_EQ(p.run().seconds, longestPath(p)) << "round " << round;
  }
}

/// In steps of `tick`: who is under way, and at which rate, is looked at again
/// in each.
double inTicks(const Program &p, double tick) {
  size_t count = p.plan.instructions.size();
  std::vector<double> left(count);
  std::vector<bool> done(count, false);
  for (size_t i = 0; i < count; ++i)
    left[i] = p.cost.instructions[i].seconds;
  auto ready = [&](size_t i) {
    const Instruction &instruction = p.plan.instructions[i];
    for (size_t j = 0; j < i; ++j) {
      const Instruction &before = p.plan.instructions[j];
      bool awaited = before.records >= 0 &&
                     std::count(instruction.waits.begin(),
                                instruction.waits.end(), before.records);
      if (!done[j] && (before.stream == instruction.stream || awaited))
        return false;
    }
    return !done[i];
  };
  double now = 0;
  while (std::count(done.begin(), done.end(), false)) {
    std::vector<size_t> running;
    for (bool changed = true; changed;) {
      changed = false;
      running.clear();
      for (size_t i = 0; i < count; ++i)
        if (ready(i)) {
          if (left[i] > tick / 2) {
            running.push_back(i);
          } else {
            done[i] = changed = true;
          }
        }
    }
    auto users = [&](Medium medium) {
      return std::count_if(running.begin(), running.end(), [&](size_t i) {
        return p.cost.instructions[i].medium == medium;
      });
    };
    bool slowed = users(Medium::WithinHost) + users(Medium::BetweenHosts) > 0;
    for (size_t i : running) {
      Medium medium = p.cost.instructions[i].medium;
      left[i] -= medium != Medium::None ? tick / double(users(medium))
                 : slowed               ? tick / p.device.collectiveSlowdown
                                        : tick;
    }
    if (!running.empty())
      now += tick;
  }
  return now;
}

TEST(Simulator, EqualsSmallStepsOnRandomPlans) {
  std::mt19937 random(11);
  const double tick = 1.0 / 256;
  for (int round = 0; round < 60; ++round) {
    Program p = randomProgram(random, /*media=*/true);
    p.device.collectiveSlowdown = 1 + double(random() % 4) / 4;
    ASSERT_NEAR(p.run().seconds, inTicks(p, tick),
                tick * 2 * double(p.plan.instructions.size()))
        << "round " << round;
  }
}

TEST(Simulator, MoreWorkNeverEndsEarlier) {
  std::mt19937 random(13);
  for (int round = 0; round < 200; ++round) {
    Program p = randomProgram(random, /*media=*/false);
    double before = p.run().seconds;
    p.cost.instructions[random() % p.cost.instructions.size()].seconds += 1;
    ASSERT_GE(p.run().seconds, before);
  }
}

TEST(Simulator, TheTimeIsAccountedFor) {
  // Compute, its waits and nothing else make the step.
  std::mt19937 random(17);
  for (int round = 0; round < 200; ++round) {
    Program p = randomProgram(random, /*media=*/true);
    p.device.collectiveSlowdown = 1.5;
    Timeline t = p.run();
    ASSERT_NEAR(t.busy[size_t(Stream::Compute)] + t.exposedCommunication() +
                    t.exposed[size_t(Stream::Compute)],
                t.seconds, 1e-9);
  }
}

} // namespace
