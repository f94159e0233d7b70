//===- ShardDimTest.cpp - shards of any dimension -------------------------===//
#include "Support/Fixtures.h"
#include "fsdp/Runtime/Collectives/ShmComm.h"
#include "fsdp/Runtime/Execution/Initialise.h"

#include <ATen/ops/arange.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp::test {
namespace {

using namespace runtime;

void expect(bool condition, const std::string &what) {
  if (!condition)
    throw std::runtime_error(what);
}

/// Parameters of a shape with 4 or 8 in the sharded dimension, reduced at
/// once, and on a mesh with replicas all-reduced.
plan::Plan dimPlan(int64_t ranks, int64_t replicas) {
  plan::Plan plan;
  plan.worldSize = ranks;
  plan.replicas = replicas;
  plan::Unit unit{"u", {}, true};
  const std::pair<std::vector<int64_t>, int32_t> params[] = {
      {{5, 3}, 0}, {{3, 8}, 1}, {{2, 4, 3}, 1}, {{2, 3, 8}, 2}, {{0, 4}, 1}};
  for (const auto &[shape, dim] : params) {
    unit.params.push_back(int32_t(plan.params.size()));
    plan.params.push_back({"p" + std::to_string(plan.params.size()),
                           {},
                           {shape, plan::DType::Float32},
                           0,
                           true});
    plan.params.back().shardDim = dim;
  }
  plan.units.push_back(unit);
  std::vector<plan::ValueId> grads, shards, reduced;
  auto addValue = [&](const plan::TensorSpec &spec) {
    plan.values.push_back(spec);
    return plan::ValueId(plan.values.size() - 1);
  };
  for (int32_t param : unit.params) {
    grads.push_back(addValue(plan.params[param].spec));
    shards.push_back(addValue(plan::shardSpec(plan, param, 0)));
    reduced.push_back(addValue(plan::shardSpec(plan, param, 0)));
  }
  plan.instructions.push_back(
      {plan::ReduceScatter{0, unit.params, grads, shards},
       plan::Phase::Backward,
       -1,
       {}});
  if (replicas > 1)
    plan.instructions.push_back(
        {plan::AllReduce{0, unit.params, shards, reduced},
         plan::Phase::Backward,
         -1,
         {}});
  return plan;
}

at::Tensor wholeOf(const plan::Plan &plan, int32_t param, double seed) {
  const plan::TensorSpec &spec = plan.params[param].spec;
  return at::arange(spec.numElements(), at::kFloat)
      .reshape(spec.shape)
      .add_(seed + 100 * param);
}

/// The part of `whole` that torch.chunk gives the rank.
at::Tensor partOf(const plan::Plan &plan, int32_t param, int64_t index,
                  const at::Tensor &whole) {
  int64_t dim = plan.params[param].shardDim;
  plan::RowRange rows = plan::shardRows(whole.size(dim), plan.shards(), index);
  return whole.narrow(dim, rows.begin, rows.size());
}

void trainLike(const plan::Plan &plan, ShmSegment &segment, int64_t rank) {
  ShmComm comm(plan, segment, rank);
  int64_t count = int64_t(plan.params.size()), index = comm.shardIndex();
  for (int32_t p = 0; p < count; ++p) {
    writeParam(plan, comm, p, wholeOf(plan, p, 0));
    expect(comm.shard(p).is_contiguous(), "a shard is row-major");
  }
  comm.publish();
  for (int64_t step = 0; step < 4; ++step) {
    comm.beginStep(step);
    std::vector<at::Tensor> full = await(comm.allGather(0)), grads;
    for (int32_t p = 0; p < count; ++p) {
      expect(full[p].equal(wholeOf(plan, p, double(step))), "all_gather");
      grads.push_back(wholeOf(plan, p, double(10 * rank)));
    }
    std::vector<at::Tensor> outs = await(comm.reduceScatter(
        std::get<plan::ReduceScatter>(plan.instructions[0].kind), grads));
    if (plan.replicas > 1)
      outs = await(comm.allReduce(
          std::get<plan::AllReduce>(plan.instructions[1].kind), outs));
    comm.beginUpdate();
    double mean = 10 * double(plan.worldSize - 1) / 2;
    for (int32_t p = 0; p < count; ++p) {
      expect(outs[p].is_contiguous(), "a gradient's shard is row-major");
      expect(outs[p].equal(partOf(plan, p, index, wholeOf(plan, p, mean))),
             "reduce_scatter");
      comm.shard(p).add_(1);
    }
    comm.publish();
  }
}

TEST(ShardDim, GathersAndReducesAnyDimension) {
  for (auto [ranks, replicas] : {std::pair{1, 1}, {2, 1}, {4, 1}, {4, 2}}) {
    plan::Plan plan = dimPlan(ranks, replicas);
    ShmSegment segment(plan);
    for (const std::string &error : forkRanks(
             ranks, [&](int64_t rank) { trainLike(plan, segment, rank); }))
      EXPECT_EQ(error, "") << ranks << " ranks, " << replicas << " replicas";
  }
}

TEST(ShardDim, RunsAreTheShard) {
  plan::Plan plan = dimPlan(4, 1);
  for (int32_t p = 0; p < int32_t(plan.params.size()); ++p)
    for (int64_t rank = 0; rank < 4; ++rank) {
      at::Tensor whole = wholeOf(plan, p, 0);
      plan::ShardRuns runs = plan::shardRuns(plan, p, rank);
      std::vector<float> elements;
      for (int64_t run = 0; run < runs.count; ++run)
        for (int64_t i = 0; i < runs.size; ++i)
          elements.push_back(
              whole
                  .const_data_ptr<float>()[runs.begin + run * runs.stride + i]);
      at::Tensor part = partOf(plan, p, rank, whole).contiguous();
      EXPECT_EQ(part.sizes(), plan::shardSpec(plan, p, rank).shape);
      EXPECT_THAT(elements,
                  testing::ElementsAreArray(part.const_data_ptr<float>(),
                                            size_t(part.numel())));
    }
}

} // namespace
} // namespace fsdp::test
