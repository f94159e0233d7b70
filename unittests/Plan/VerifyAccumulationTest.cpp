//===- VerifyAccumulationTest.cpp - sums over microbatches in a plan ------===//
#include "Support/PlanMutations.h"

namespace fsdp::test {
namespace {

using namespace plan;

/// Plans that reduce in the last microbatch.
const std::vector<Mutation> kPartialMutations = {
    {"AllReducedEachTime", "P14",
     [](Plan &p) { runIn<AllReduce>(p, 0, When::Every); }},
    {"ScatteredOnce", "P14",
     [](Plan &p) { runIn<ReduceScatter>(p, 0, When::Last); }},
    {"SumOfOtherDtype", "P5",
     [](Plan &p) {
       p.values[size_t(first<Accumulate>(p).outs[0])].dtype = DType::Float64;
     }},
    {"ShardOfOtherParam", "P14", [](Plan &p) {
       auto &sums = first<Accumulate>(p, 1);
       std::swap(sums.params[0], sums.params[1]);
     }}};
const std::vector<Mutation> kWholeMutations = {
    {"NothingAccumulated", "P14",
     [](Plan &p) {
       auto &reduce = first<ReduceScatter>(p);
       reduce.ins = first<Accumulate>(p).ins;
       runIn<ReduceScatter>(p, 0, When::Every);
     }},
    {"ReducedEachTime", "P14",
     [](Plan &p) { runIn<ReduceScatter>(p, 0, When::Every); }},
    {"SumOfOtherShape", "P14",
     [](Plan &p) {
       p.values[size_t(first<Accumulate>(p).outs[0])].shape = {1};
     }},
    {"SumOfIntegers", "P20",
     [](Plan &p) {
       p.values[size_t(first<Accumulate>(p).outs[0])].dtype = DType::Int64;
     }},
    {"SumBesideItsPlace", "P10", [](Plan &p) {
       int32_t param = first<Accumulate>(p).params[0];
       for (Instruction &instruction : p.instructions)
         if (auto *call = std::get_if<Call>(&instruction.kind))
           if (call->outs == first<Accumulate>(p).ins)
             call->reduceInputOf = param;
     }}};

void expectAllCaught(const Plan &plan, const std::vector<Mutation> &mutations) {
  ASSERT_NO_THROW(verifyPlan(plan, "p.json"));
  for (const Mutation &mutation : mutations) {
    SCOPED_TRACE(mutation.name);
    Plan mutated = plan;
    mutation.apply(mutated);
    expectCaught(mutated, mutation.label);
  }
}

TEST(VerifyAccumulation, CatchesMutationsOfPartialSums) {
  Plan plan = samplePlan(4, false, 2);
  accumulatePartial(plan);
  expectAllCaught(plan, kPartialMutations);
}

TEST(VerifyAccumulation, CatchesMutationsOfWholeSums) {
  Plan plan = samplePlan(2);
  accumulateWhole(plan);
  expectAllCaught(plan, kWholeMutations);
}

TEST(VerifyAccumulation, AcceptsSumsOfOneReplica) {
  Plan plan = samplePlan(4, false, 2);
  plan.worldSize = 2;
  plan.replicas = 1;
  accumulatePartial(plan);
  EXPECT_NO_THROW(verifyPlan(plan, "p.json"));
}

} // namespace
} // namespace fsdp::test
