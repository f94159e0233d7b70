//===- LowerBoundTest.cpp - the least time of a plan's instructions -------===//
#include "fsdp/Simulate/LowerBound.h"

#include "fsdp/Plan/Operands.h"
#include "fsdp/Simulate/Simulator.h"

#include <gtest/gtest.h>

#include <random>

using namespace fsdp::plan;
using namespace fsdp::simulate;

namespace {

/// A plan of which only streams and kinds count, and its costs.
struct Program {
  Plan plan;
  StepCost cost;
  DeviceModel device;

  Instruction &add(decltype(Instruction::kind) kind, double seconds,
                   Medium medium = Medium::None) {
    plan.instructions.push_back({std::move(kind)});
    plan.instructions.back().stream = ownStream(plan.instructions.back());
    cost.instructions.push_back({seconds, medium});
    return plan.instructions.back();
  }
  LowerBound bound() const { return lowerBound(plan, cost, device); }
  double step() const { return simulate(plan, cost, device).seconds; }
};

TEST(LowerBound, IsTheLongestOfComputeAndEachKindOfTransfer) {
  Program p;
  p.add(AllGather{}, 2);
  p.add(Constant{}, 3);
  p.add(Constant{}, 1);
  p.add(ReduceScatter{}, 3);
  EXPECT_EQ(p.bound().seconds, 4);
  EXPECT_EQ(p.bound().of, "compute");
  // One on the compute stream could be beside it.
  p.add(ReduceScatter{}, 2).stream = Stream::Compute;
  EXPECT_EQ(p.bound().seconds, 5);
  EXPECT_EQ(p.bound().of, "reduce_scatter");
  p.cost.outsideSeconds = 0.5;
  EXPECT_EQ(p.bound().seconds, 5.5);
}

TEST(LowerBound, CollectivesOfTheModelAreInTheWayOfCompute) {
  Program p;
  p.add(Constant{}, 3);
  p.add(Call{{"_c10d_functional::all_reduce", ""}, {}, {}}, 2,
        Medium::WithinHost);
  EXPECT_EQ(p.bound().seconds, 5);
  EXPECT_EQ(p.bound().of, "compute and collectives of the model");
  EXPECT_EQ(p.step(), 5);
}

TEST(LowerBound, CollectivesOfSeveralKindsShareALink) {
  Program p;
  p.add(AllGather{}, 2, Medium::BetweenHosts);
  p.add(ReduceScatter{}, 3, Medium::BetweenHosts);
  p.add(AllReduce{}, 4, Medium::WithinHost);
  p.add(Constant{}, 1);
  EXPECT_EQ(p.bound().seconds, 5);
  EXPECT_EQ(p.bound().of, "collectives between hosts");
  EXPECT_EQ(p.step(), 5);
}

TEST(LowerBound, OneThreadDoesAll) {
  Program p;
  p.device.serialStreams = true;
  p.add(AllGather{}, 2);
  p.add(Constant{}, 3);
  p.add(Wait{}, 1);
  EXPECT_EQ(p.bound().seconds, 6);
  EXPECT_EQ(p.bound().of, "one thread");
  p.device.serialStreams = false;
  EXPECT_EQ(p.bound().seconds, 3); // the wait could be none
}

TEST(LowerBound, CountsMicrobatches) {
  Program p;
  p.plan.accumulationSteps = 3;
  p.add(AllGather{}, 25).when = When::First;
  p.add(Constant{}, 5);
  p.add(ReduceScatter{}, 9);
  p.add(Constant{}, 4).phase = Phase::Optimizer;
  EXPECT_EQ(p.bound().seconds, 27);
  EXPECT_EQ(p.bound().of, "reduce_scatter");
}

TEST(LowerBound, NoPlanIsFaster) {
  std::mt19937 random(11);
  auto below = [&](int n) { return int(random() % unsigned(n)); };
  for (int round = 0; round < 1000; ++round) {
    Program p;
    p.plan.accumulationSteps = 1 + below(3);
    p.device.collectiveSlowdown = 1 + 0.25 * below(3);
    p.device.serialStreams = below(8) == 0;
    int events = 0;
    for (int i = 0, count = 2 + below(30); i < count; ++i) {
      Medium medium = below(2) ? Medium::WithinHost : Medium::BetweenHosts;
      double seconds = below(8);
      Instruction *instruction = nullptr;
      switch (below(4)) {
      case 0:
        instruction = &p.add(AllGather{}, seconds, medium);
        break;
      case 1:
        instruction = &p.add(ReduceScatter{}, seconds, medium);
        break;
      default:
        instruction = &p.add(Constant{}, seconds);
      }
      for (int k = below(3); k > 0 && events > 0; --k)
        instruction->waits.push_back(below(events));
      if (below(2))
        instruction->records = events++;
    }
    ASSERT_GE(p.step() * (1 + 1e-9), p.bound().seconds) << "round " << round;
  }
}

TEST(LowerBound, TheGapIsAFraction) {
  EXPECT_EQ(describeGap({0.002, "compute"}, 0.0025),
            "25.0 % above the least time of its instructions, 2.000 ms of "
            "compute");
}

} // namespace
