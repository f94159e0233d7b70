//===- VerifyPlacementTest.cpp - invariants of replicas, groups, offload --===//
#include "Support/PlanMutations.h"

namespace fsdp::test {
namespace {

using namespace plan;

const std::vector<Mutation> kReplicaMutations = {
    {"NotAllReduced", "P16",
     [](Plan &p) {
       Instruction all = take(p, find<AllReduce>(p));
       first<OptimizerStep>(p).grads[0] = std::get<AllReduce>(all.kind).ins[0];
     }},
    {"AllReducedTwice", "P16",
     [](Plan &p) {
       AllReduce again = first<AllReduce>(p);
       std::swap(again.ins, again.outs);
       p.instructions.insert(p.instructions.begin() + long(find<AllReduce>(p)) +
                                 1,
                             {again, Phase::Backward, -1, {}});
     }},
    {"WrongGradient", "P16",
     [](Plan &p) { first<AllReduce>(p).params[0] = 1; }},
    {"StepsTheInput", "P9",
     [](Plan &p) {
       first<OptimizerStep>(p).grads[0] = first<AllReduce>(p).ins[0];
     }},
    {"ShardShape", "P5",
     [](Plan &p) { p.values[first<AllReduce>(p).outs[0]].shape[0] += 1; }},
    {"ReduceCount", "P1", [](Plan &p) { first<AllReduce>(p).outs.clear(); }},
    {"ZeroDivisor", "P20",
     [](Plan &p) { first<AllReduce>(p).postdivide = 0.0; }},
    {"ReducedInAnotherDtype", "P5",
     [](Plan &p) { first<ReduceScatter>(p).reduceDtype = DType::BFloat16; }},
};

class VerifyReplicas : public testing::TestWithParam<Mutation> {};

TEST_P(VerifyReplicas, CatchesMutation) {
  Plan plan = samplePlan(4, false, 2);
  ASSERT_NO_THROW(verifyPlan(plan, "p.json"));
  GetParam().apply(plan);
  expectCaught(plan, GetParam().label);
}

INSTANTIATE_TEST_SUITE_P(All, VerifyReplicas,
                         testing::ValuesIn(kReplicaMutations),
                         [](const auto &info) { return info.param.name; });

TEST(VerifyOneReplica, IsNotAllReduced) {
  Plan plan = samplePlan(4, false, 2);
  plan.worldSize = 2;
  plan.replicas = 1;
  expectCaught(plan, "P16");
}

/// Four ranks: groups of two keep unit 0 after forward, and what backward
/// gathers stays for the next microbatch.
Plan keptPlan() {
  Plan plan = samplePlan(4);
  first<Reshard>(plan).keep = 2;
  first<AllGather>(plan, 2).group = 2;
  accumulateWhole(plan);
  for (auto [gather, last] : {std::pair(0, 0), std::pair(1, 2)}) {
    runIn<AllGather>(plan, gather, When::First);
    first<AllGather>(plan, gather).kept = first<AllGather>(plan, last).outs;
  }
  for (int reshard : {1, 2})
    runIn<Reshard>(plan, reshard, When::Last);
  return plan;
}

const std::vector<Mutation> kKeptMutations = {
    {"KeepsNothing", "P18", [](Plan &p) { first<Reshard>(p).keep = 0; }},
    {"OtherGroups", "P18", [](Plan &p) { first<AllGather>(p, 2).group = 4; }},
    {"GroupsOfOne", "P18",
     [](Plan &p) {
       first<Reshard>(p).keep = first<AllGather>(p, 2).group = 1;
     }},
    {"GroupsOfAll", "P18",
     [](Plan &p) {
       first<Reshard>(p).keep = first<AllGather>(p, 2).group = 4;
     }},
    {"GroupsDoNotDivide", "P18",
     [](Plan &p) {
       first<Reshard>(p).keep = first<AllGather>(p, 2).group = 3;
     }},
    {"GroupsOfTwoSizes", "P18",
     [](Plan &p) {
       p.worldSize = 8;
       first<Reshard>(p, 1) = {0, 4};
     }},
    {"KeepsInTheLastMicrobatch", "P18",
     [](Plan &p) { runIn<Reshard>(p, 0, When::Last); }},
    {"GathersInTheFirstOnly", "P19",
     [](Plan &p) { runIn<Reshard>(p, 1, When::Every); }},
    {"ReshardsInTheLastOnly", "P19",
     [](Plan &p) { runIn<AllGather>(p, 1, When::Every); }},
    {"SecondGatherInTheFirst", "P19",
     [](Plan &p) { runIn<AllGather>(p, 2, When::First); }},
    {"KeepsOfNoGather", "P19",
     [](Plan &p) { first<AllGather>(p, 1).kept.clear(); }},
    {"KeepsOfItsOwn", "P19",
     [](Plan &p) {
       first<AllGather>(p, 1).kept = first<AllGather>(p, 1).outs;
     }},
    {"GathersInTheLast", "P40",
     [](Plan &p) { runIn<AllGather>(p, 1, When::Last); }},
    {"ReshardsInTheFirst", "P40",
     [](Plan &p) { runIn<Reshard>(p, 1, When::First); }},
    {"ComputesInTheFirst", "P40",
     [](Plan &p) { runIn<Call>(p, 0, When::First); }},
    {"UpdatesInTheLast", "P40",
     [](Plan &p) { runIn<OptimizerStep>(p, 0, When::Last); }},
    {"OneMicrobatch", "P40", [](Plan &p) { p.accumulationSteps = 1; }},
    {"FreesASumEachTime", "P40",
     [](Plan &p) {
       size_t at = find<Accumulate>(p);
       ValueId sum = std::get<Accumulate>(p.instructions[at].kind).outs[0];
       for (Instruction &instruction : p.instructions)
         std::erase(instruction.frees, sum);
       Instruction wait{Wait{}, Phase::Backward, -1, {sum}};
       p.instructions.insert(
           p.instructions.begin() + long(find<ReduceScatter>(p)) + 1, wait);
     }},
};

class VerifyKept : public testing::TestWithParam<Mutation> {};

TEST_P(VerifyKept, CatchesMutation) {
  Plan plan = keptPlan();
  ASSERT_NO_THROW(verifyPlan(plan, "p.json"));
  std::string text = printPlan(plan);
  EXPECT_EQ(printPlan(parsePlan(text, "p.json")), text);
  GetParam().apply(plan);
  EXPECT_NE(printPlan(plan), text);
  expectCaught(plan, GetParam().label);
}

INSTANTIATE_TEST_SUITE_P(All, VerifyKept, testing::ValuesIn(kKeptMutations),
                         [](const auto &info) { return info.param.name; });

const std::vector<Mutation> kOffloadMutations = {
    {"NotCopiedToDevice", "P21",
     [](Plan &p) { take(p, find<CopyToDevice>(p)); }},
    {"CopiedToDeviceTwice", "P21",
     [](Plan &p) {
       size_t at = find<CopyToDevice>(p);
       p.instructions.insert(p.instructions.begin() + long(at),
                             Instruction(p.instructions[at]));
     }},
    {"CopyOfAnotherUnit", "P21",
     [](Plan &p) { first<CopyToDevice>(p).unit = 1; }},
    {"UnitOutOfRange", "P1", [](Plan &p) { first<CopyToDevice>(p).unit = 7; }},
    {"NotCopiedToHost", "P21",
     [](Plan &p) {
       Instruction copy = take(p, find<CopyToHost>(p));
       first<OptimizerStep>(p).grads[0] =
           std::get<CopyToHost>(copy.kind).ins[0];
     }},
    {"CopiedToHostTwice", "P21",
     [](Plan &p) {
       CopyToHost again = first<CopyToHost>(p);
       again.ins = again.outs;
       p.values.push_back(TensorSpec(p.values[size_t(again.ins[0])]));
       again.outs = {ValueId(p.values.size()) - 1};
       first<OptimizerStep>(p).grads[0] = again.outs[0];
       p.instructions.insert(p.instructions.begin() +
                                 long(find<CopyToHost>(p)) + 1,
                             {again, Phase::Backward, -1, {}});
     }},
    {"GradientOfAnotherUnit", "P21",
     [](Plan &p) { first<CopyToHost>(p).params[0] = 1; }},
    {"GradientCount", "P1", [](Plan &p) { first<CopyToHost>(p).outs.clear(); }},
    {"EvaluationWithoutCopy", "P21",
     [](Plan &p) {
       std::erase_if(p.evaluation, [](const Instruction &instruction) {
         return std::holds_alternative<CopyToDevice>(instruction.kind);
       });
     }},
};

class VerifyOffload : public testing::TestWithParam<Mutation> {};

TEST_P(VerifyOffload, CatchesMutation) {
  Plan plan = samplePlan(2);
  offload(plan);
  addEvaluation(plan);
  ASSERT_NO_THROW(verifyPlan(plan, "p.json"));
  EXPECT_EQ(printPlan(parsePlan(printPlan(plan), "p.json")), printPlan(plan));
  GetParam().apply(plan);
  expectCaught(plan, GetParam().label);
}

INSTANTIATE_TEST_SUITE_P(All, VerifyOffload,
                         testing::ValuesIn(kOffloadMutations),
                         [](const auto &info) { return info.param.name; });

} // namespace
} // namespace fsdp::test
