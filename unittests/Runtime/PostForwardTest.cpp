//===- PostForwardTest.cpp - parameters kept in groups after forward ------===//
#include "Support/Fixtures.h"
#include "Support/SamplePlan.h"
#include "fsdp/Runtime/Collectives/ShmComm.h"

#include <ATen/ops/arange.h>
#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <thread>

namespace fsdp::test {
namespace {

using namespace runtime;

void expect(bool condition, const std::string &what) {
  if (!condition)
    throw std::runtime_error(what);
}

/// Both units of the sample plan are kept; "b" has fewer rows than some worlds
/// have ranks, "scale" one.
plan::Plan keptPlan(int64_t ranks, int64_t group, int64_t replicas = 1) {
  plan::Plan plan = samplePlan(ranks, false, replicas);
  for (plan::Instruction &instruction : plan.instructions)
    if (auto *reshard = std::get_if<plan::Reshard>(&instruction.kind))
      reshard->keep = group;
  return plan;
}

/// The whole parameter of a replica at a version, every element another.
at::Tensor valueOf(const plan::Plan &plan, int32_t param, int64_t replica,
                   int64_t version) {
  const plan::TensorSpec &spec = plan.params[param].spec;
  return at::arange(spec.numElements(), at::kFloat)
      .reshape(spec.shape)
      .add_(double(1000 * version + 100 * param + 10 * replica));
}

/// Keeps and gathers, at every step twice with the same parameters; whoever
/// gathers compares with what the whole replica holds.
void keepAndGather(const plan::Plan &plan, ShmSegment &segment, int64_t rank,
                   int64_t group) {
  ShmComm comm(plan, segment, rank);
  int64_t replica = rank / plan.shards();
  std::mt19937 random{uint32_t(rank)};
  auto delay = [&] {
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
  };
  auto writeShards = [&](int64_t version) {
    for (int32_t p = 0; p < int32_t(plan.params.size()); ++p) {
      plan::RowRange rows = plan::shardRows(plan.params[p].spec.shape[0],
                                            plan.shards(), comm.shardIndex());
      comm.shard(p).copy_(valueOf(plan, p, replica, version)
                              .narrow(0, rows.begin, rows.size()));
    }
    comm.publish();
  };
  auto check = [&](int32_t unit, const std::vector<at::Tensor> &full,
                   int64_t version) {
    for (size_t i = 0; i < full.size(); ++i)
      expect(full[i].equal(
                 valueOf(plan, plan.units[unit].params[i], replica, version)),
             "a group gathers what its replica holds");
  };
  writeShards(0);
  for (int64_t step = 0; step < 20; ++step) {
    comm.beginStep(step);
    for (int32_t microbatch : {0, 1}) {
      if (microbatch > 0)
        comm.beginMicrobatch();
      for (int32_t unit : {0, 1}) {
        delay();
        check(unit, await(comm.allGather(unit)), step);
        comm.reshard(unit, group);
      }
      for (int32_t unit : {1, 0}) {
        delay();
        check(unit, await(comm.allGather(unit, group)), step);
        comm.reshard(unit);
      }
    }
    comm.beginUpdate();
    writeShards(step + 1);
  }
}

TEST(PostForward, GroupsHoldWhatReplicasHold) {
  struct {
    int64_t ranks, group, replicas;
  } cases[] = {{4, 2, 1}, {6, 2, 1}, {6, 3, 1}, {8, 4, 1}, {8, 2, 2}};
  for (auto [ranks, group, replicas] : cases) {
    plan::Plan plan = keptPlan(ranks, group, replicas);
    ShmSegment segment(plan);
    for (const std::string &error : forkRanks(ranks, [&](int64_t rank) {
           keepAndGather(plan, segment, rank, group);
         }))
      EXPECT_EQ(error, "") << ranks << " ranks, groups of " << group << ", "
                           << replicas << " replicas";
  }
}

TEST(PostForward, EachGroupHasAPlaceOfItsOwn) {
  plan::Plan plan = keptPlan(8, 2);
  SegmentLayout layout(plan), without(samplePlan(8));
  size_t bytes = 0;
  for (size_t p = 0; p < plan.params.size(); ++p) {
    EXPECT_EQ(layout.kept[p].group, 2);
    EXPECT_GE(layout.kept[p].stride, size_t(plan.params[p].spec.numBytes()));
    EXPECT_GE(layout.kept[p].begin, layout.paramsBegin + layout.replicaBytes);
    EXPECT_LE(layout.kept[p].begin + 4 * layout.kept[p].stride,
              layout.areasBegin);
    bytes += 4 * layout.kept[p].stride;
    EXPECT_EQ(without.kept[p].group, 0);
  }
  EXPECT_GE(layout.totalBytes + 4096, without.totalBytes + bytes);
}

} // namespace
} // namespace fsdp::test
