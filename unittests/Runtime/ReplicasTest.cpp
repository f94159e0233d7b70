//===- ReplicasTest.cpp - collectives of HSDP's two axes ------------------===//
#include "Support/Fixtures.h"
#include "Support/SamplePlan.h"
#include "fsdp/Plan/Messages.h"
#include "fsdp/Runtime/Collectives/ShmComm.h"

#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <thread>

namespace fsdp::test {
namespace {

using namespace runtime;

/// A gradient whose sums depend on their order.
float gradOf(int64_t rank, int64_t step, int64_t param) {
  return 0.1F * float(rank + 1) + 1e-3F * float(step) + 10.0F * float(param);
}

void expect(bool condition, const std::string &what) {
  if (!condition)
    throw std::runtime_error(what);
}

/// What Gloo adds for the element at `place` of a message.
float sumAt(int64_t place, int64_t elements, const std::vector<float> &terms) {
  auto ranks = int64_t(terms.size());
  int64_t piece = place / plan::ringPiece(elements, sizeof(float), ranks);
  float sum = 0;
  for (int64_t back = 1; back <= ranks; ++back)
    sum += terms[size_t((piece - back + ranks) % ranks)];
  return sum;
}

/// What every rank with this shard gets for the `element`-th of its gradient.
float meanGrad(const plan::Plan &plan, int64_t turn, int32_t param,
               const plan::MessagePlace &place, int64_t shard,
               int64_t element) {
  int64_t shards = plan.shards(), at = place.begin + element;
  std::vector<float> parts;
  for (int64_t r = 0; r < plan.replicas; ++r) {
    std::vector<float> terms;
    for (int64_t s = 0; s < shards; ++s)
      terms.push_back(gradOf(r * shards + s, turn, param));
    parts.push_back(sumAt(shard * place.row + at, shards * place.row, terms) /
                    float(shards));
  }
  return sumAt(at, place.row, parts) / float(plan.replicas);
}

/// Steps the sample plan's collectives, of several microbatches a step; every
/// rank checks its own parts.
void trainLike(const plan::Plan &plan, ShmSegment &segment, int64_t rank) {
  ShmComm comm(plan, segment, rank);
  const plan::Messages messages(plan);
  int64_t shards = plan.shards(), replica = rank / shards;
  expect(comm.shardIndex() == rank % shards, "shard index");
  std::mt19937 random{uint32_t(rank)};
  auto writeShards = [&](int64_t version) {
    for (size_t p = 0; p < plan.params.size(); ++p)
      comm.shard(int32_t(p)).fill_(double(100 * replica + version));
  };
  writeShards(0);
  comm.publish();
  auto reduceAll = [&](int64_t turn) {
    std::vector<std::pair<const plan::AllReduce *, Collective>> results;
    std::vector<at::Tensor> reduced;
    for (const plan::Instruction &instruction : plan.instructions) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
      if (auto *reduce = std::get_if<plan::ReduceScatter>(&instruction.kind)) {
        std::vector<at::Tensor> grads;
        for (int32_t p : reduce->params)
          grads.push_back(at::full(plan.params[size_t(p)].spec.shape,
                                   gradOf(rank, turn, p), at::kFloat));
        reduced = await(comm.reduceScatter(*reduce, grads));
      } else if (auto *all = std::get_if<plan::AllReduce>(&instruction.kind)) {
        results.emplace_back(all, comm.allReduce(*all, reduced));
      }
    }
    for (const auto &[all, begun] : results) {
      std::vector<at::Tensor> outs = await(begun);
      std::vector<plan::MessagePlace> places =
          messages.messagePlaces(all->params);
      for (size_t i = 0; i < outs.size(); ++i) {
        plan::TensorSpec spec =
            plan::shardSpec(plan, all->params[i], comm.shardIndex());
        expect(outs[i].sizes() == spec.shape, "shape of a shard");
        const auto *data = outs[i].const_data_ptr<float>();
        for (int64_t k = 0; k < outs[i].numel(); ++k)
          expect(data[k] == meanGrad(plan, turn, all->params[i], places[i],
                                     comm.shardIndex(), k),
                 "average over shards, then over replicas");
      }
    }
  };
  for (int64_t step = 0; step < 4; ++step) {
    comm.beginStep(step);
    for (size_t u = 0; u < plan.units.size(); ++u)
      for (const at::Tensor &full : await(comm.allGather(int32_t(u))))
        expect(full.eq(double(100 * replica + step)).all().item<bool>(),
               "a replica gathers its own parameters");
    for (int64_t microbatch = 0; microbatch < 3; ++microbatch) {
      if (microbatch > 0)
        comm.beginMicrobatch();
      reduceAll(3 * step + microbatch);
    }
    comm.beginUpdate();
    writeShards(step + 1);
    comm.publish();
  }
}

constexpr std::pair<int64_t, int64_t> kMeshes[] = {
    {4, 2}, {2, 2}, {6, 2}, {6, 3}};

void trainAll(const plan::Plan &plan) {
  ShmSegment segment(plan);
  for (const std::string &error : forkRanks(plan.worldSize, [&](int64_t rank) {
         trainLike(plan, segment, rank);
       }))
    EXPECT_EQ(error, "") << plan.worldSize << " ranks, " << plan.replicas
                         << " replicas";
}

TEST(Replicas, AverageOverBothAxes) {
  for (auto [ranks, replicas] : kMeshes)
    trainAll(samplePlan(ranks, false, replicas));
}

TEST(Replicas, AverageSums) {
  for (auto [ranks, replicas] : kMeshes) {
    plan::Plan plan = samplePlan(ranks, false, replicas);
    accumulatePartial(plan);
    trainAll(plan);
  }
}

TEST(Replicas, HaveParametersAndShardsOfTheirOwn) {
  plan::Plan plan = samplePlan(4, false, 2);
  SegmentLayout layout(plan);
  EXPECT_EQ(layout.areasBegin, layout.paramsBegin + 2 * layout.replicaBytes);
  for (size_t p = 0; p < plan.params.size(); ++p)
    EXPECT_LE(layout.params[p] + size_t(plan.params[p].spec.numBytes()),
              layout.replicaBytes);
  // What is reduced lies before the shards of it.
  EXPECT_GE(layout.shardGrads[0],
            layout.grads[1] + size_t(plan.params[1].spec.numBytes()));
}

} // namespace
} // namespace fsdp::test
