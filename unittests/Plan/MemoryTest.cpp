//===- MemoryTest.cpp - what a plan keeps in memory, and when -------------===//
#include "fsdp/Plan/Memory.h"
#include "Support/SamplePlan.h"
#include "fsdp/Plan/DeviceBuffers.h"
#include "fsdp/Plan/SegmentLayout.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace fsdp::test {
namespace {

using namespace plan;

const Storage *storageOf(const Memory &memory, ValueId value) {
  int32_t index = memory.storageOf[size_t(value)];
  return index == -1 ? nullptr : &memory.storages[size_t(index)];
}

template <typename Kind> const Kind &get(const Plan &plan, int skip = 0) {
  return std::get<Kind>(plan.instructions[find<Kind>(plan, skip)].kind);
}

TEST(Memory, FollowsDefinitionsAndFrees) {
  Plan plan = samplePlan(2);
  Memory memory = replayMemory(plan, MemoryModel::SharedHost);
  // z, of the second call, is freed by the third.
  const Storage *z = storageOf(memory, get<Call>(plan, 1).outs[0]);
  ASSERT_NE(z, nullptr);
  EXPECT_EQ(z->bytes, 128); // 80, in places of 64
  EXPECT_EQ(z->lives.size(), 1u);
  EXPECT_EQ(z->lives[0].first, int64_t(find<Call>(plan, 1)));
  EXPECT_EQ(z->lives[0].last, int64_t(find<Call>(plan, 2)));
  EXPECT_EQ(z->use, MemoryUse::Temporary);
  // h is never freed; backward takes it.
  const Storage *h = storageOf(memory, get<Call>(plan, 0).outs[0]);
  EXPECT_EQ(h->lives[0].last, memory.stepPositions - 1);
  EXPECT_EQ(h->use, MemoryUse::Activation);
  const Storage *x = storageOf(memory, plan.inputs[0].value);
  EXPECT_EQ(x->use, MemoryUse::Input);
  EXPECT_EQ(x->definition, -1);
  EXPECT_EQ(x->lives[0].first, 0);
}

TEST(Memory, AViewKeepsItsStorage) {
  Plan plan = samplePlan(2);
  ValueId h = get<Call>(plan, 0).outs[0];
  ValueId view = -1;
  size_t at = 0;
  for (size_t i = 0; i < plan.instructions.size(); ++i)
    if (const auto *call = std::get_if<Call>(&plan.instructions[i].kind);
        call && plan.values[call->outs[0]].storage == h) {
      view = call->outs[0];
      at = i;
    }
  ASSERT_NE(view, -1);
  ValueId storage = h;
  plan.instructions[at].frees.push_back(storage);
  plan.instructions[at + 1].frees.push_back(view);
  Memory memory = replayMemory(plan, MemoryModel::SharedHost);
  EXPECT_EQ(storageOf(memory, view), storageOf(memory, storage));
  EXPECT_EQ(storageOf(memory, view)->lives.back().last, int64_t(at) + 1);
}

TEST(Memory, SharedParametersAndReduceInputsLieElsewhere) {
  Plan plan = samplePlan(2);
  ValueId gathered = get<AllGather>(plan, 1).outs[0];
  ValueId steered = get<ReduceScatter>(plan).ins[0];
  ValueId shard = get<ReduceScatter>(plan).outs[0];
  ValueId buffer = get<ReadBuffer>(plan).out;
  Memory shared = replayMemory(plan, MemoryModel::SharedHost);
  EXPECT_EQ(storageOf(shared, gathered), nullptr);
  EXPECT_EQ(storageOf(shared, steered), nullptr);
  EXPECT_EQ(storageOf(shared, buffer), nullptr);
  EXPECT_EQ(storageOf(shared, shard)->use, MemoryUse::GradientShard);

  Memory device = replayMemory(plan, MemoryModel::Device);
  const Storage *full = storageOf(device, gathered);
  ASSERT_NE(full, nullptr);
  EXPECT_EQ(full->use, MemoryUse::GatheredParam);
  EXPECT_EQ(full->lives[0].first, int64_t(find<AllGather>(plan, 1)));
  EXPECT_EQ(full->lives[0].last, int64_t(find<Reshard>(plan, 0)));
  EXPECT_EQ(storageOf(device, steered)->use, MemoryUse::Gradient);
  EXPECT_EQ(storageOf(device, buffer), nullptr);

  // The bytes of unit "layer" twice, and of the root unit once.
  int64_t gatheredStorages = std::count_if(
      device.storages.begin(), device.storages.end(),
      [](const Storage &s) { return s.use == MemoryUse::GatheredParam; });
  EXPECT_EQ(gatheredStorages, 5);
}

TEST(Memory, AReductionWithoutUseHasNoPlace) {
  Plan plan = samplePlan(2);
  ValueId shard = get<ReduceScatter>(plan).outs[0];
  plan.instructions.pop_back(); // optimizer_step
  Memory memory = replayMemory(plan, MemoryModel::SharedHost);
  EXPECT_EQ(storageOf(memory, shard), nullptr);
}

TEST(Memory, SumsLiveThroughEveryMicrobatch) {
  Plan plan = samplePlan(2);
  accumulateWhole(plan);
  size_t last = find<ReduceScatter>(plan);
  ValueId sum = get<Accumulate>(plan).outs[0];
  plan.instructions[last].frees.push_back(sum);
  Memory memory = replayMemory(plan, MemoryModel::SharedHost);
  const Storage *storage = storageOf(memory, sum);
  EXPECT_EQ(storage->use, MemoryUse::GradientSum);
  EXPECT_EQ(storage->lives[0].first, 0);
  // The next microbatch begins after the end of backward.
  EXPECT_EQ(storage->lives[0].last, int64_t(find<OptimizerStep>(plan)) - 1);
  plan.accumulationSteps = 1;
  plan.instructions[last].when = When::Every;
  memory = replayMemory(plan, MemoryModel::SharedHost);
  EXPECT_EQ(storageOf(memory, sum)->lives[0].first,
            int64_t(find<Accumulate>(plan)));
  EXPECT_EQ(storageOf(memory, sum)->lives[0].last, int64_t(last));
}

TEST(Memory, AUnitStaysGatheredOverMicrobatches) {
  Plan plan = samplePlan(2);
  accumulateWhole(plan);
  size_t first = find<AllGather>(plan, 1), again = find<AllGather>(plan, 2);
  size_t between = find<Reshard>(plan, 0), last = find<Reshard>(plan, 1);
  plan.instructions[first].when = When::First;
  plan.instructions[last].when = When::Last;
  Memory memory = replayMemory(plan, MemoryModel::Device);
  ValueId one = get<AllGather>(plan, 1).outs[0];
  ValueId two = get<AllGather>(plan, 2).outs[0];
  const Storage *storage = storageOf(memory, one);
  EXPECT_EQ(storage, storageOf(memory, two));
  ASSERT_EQ(storage->lives.size(), 2u);
  EXPECT_EQ(storage->lives[0].first, 0);
  EXPECT_EQ(storage->lives[0].last, int64_t(between));
  EXPECT_EQ(storage->lives[1].first, int64_t(again));
  EXPECT_EQ(storage->lives[1].last, int64_t(find<OptimizerStep>(plan)) - 1);
  layOutArena(plan, MemoryModel::Device);
  EXPECT_EQ(plan.values[one].offset, plan.values[two].offset);
}

TEST(Memory, OffloadedUnitsAreOnTheDeviceWhileTheyAreGathered) {
  Plan plan = samplePlan(2);
  offload(plan);
  addDeviceBuffers(plan);
  Memory memory = replayMemory(plan, MemoryModel::Device);
  ValueId onHost = get<CopyToHost>(plan).outs[0];
  EXPECT_EQ(storageOf(memory, onHost), nullptr);
  ValueId buffer = plan.instructions[find<CopyToDevice>(plan)].buffer;
  const Storage *copy = storageOf(memory, buffer);
  ASSERT_NE(copy, nullptr);
  EXPECT_EQ(copy->use, MemoryUse::GatheredParam);
  EXPECT_EQ(copy->bytes, 64); // two rows of seven floats
  EXPECT_EQ(copy->lives[0].first, int64_t(find<CopyToDevice>(plan)));
  auto gather = size_t(copy->lives[0].last);
  EXPECT_EQ(std::get<AllGather>(plan.instructions[gather].kind).source, buffer);
  auto uses = staticBytes(plan, MemoryModel::Device);
  auto without = staticBytes(samplePlan(2), MemoryModel::Device);
  // w1 [3, 7]: two rows of rank 0.
  EXPECT_EQ(without[size_t(MemoryUse::ParamShard)] -
                uses[size_t(MemoryUse::ParamShard)],
            2 * 7 * 4);
}

TEST(Memory, TheEvaluationIsBehindTheStep) {
  Plan plan = samplePlan(2);
  addEvaluation(plan);
  Memory memory = replayMemory(plan, MemoryModel::SharedHost);
  EXPECT_EQ(memory.positions,
            int64_t(plan.instructions.size() + plan.evaluation.size()));
  const Storage *x = storageOf(memory, plan.inputs[0].value);
  ASSERT_EQ(x->lives.size(), 2u);
  EXPECT_EQ(x->lives[1].first, memory.stepPositions);
  EXPECT_EQ(&instructionAt(plan, memory.stepPositions), &plan.evaluation[0]);
  const Storage *loss = storageOf(memory, plan.evaluationLoss);
  EXPECT_EQ(loss->lives[0].last, memory.positions - 1);
}

TEST(Memory, LiveBytesAndWhatIsAlive) {
  Plan plan = samplePlan(2);
  addEvaluation(plan);
  Memory memory = replayMemory(plan, MemoryModel::SharedHost);
  std::vector<int64_t> live = memory.liveBytes();
  ASSERT_EQ(int64_t(live.size()), memory.positions);
  for (int64_t position = 0; position < memory.positions; ++position) {
    int64_t bytes = 0, previous = INT64_MAX;
    for (int32_t index : memory.aliveAt(position)) {
      int64_t size = memory.storages[size_t(index)].bytes;
      EXPECT_LE(size, previous);
      previous = size;
      bytes += size;
    }
    EXPECT_EQ(live[size_t(position)], bytes) << position;
  }
}

TEST(StaticBytes, OfASharedSegmentAndOfADevice) {
  Plan plan = samplePlan(2);
  SegmentLayout layout(plan);
  auto shared = staticBytes(plan, MemoryModel::SharedHost);
  EXPECT_EQ(shared[size_t(MemoryUse::ParamShard)],
            int64_t(layout.replicaBytes) / 2);
  EXPECT_EQ(shared[size_t(MemoryUse::ReduceInput)], int64_t(layout.areaBytes));
  EXPECT_EQ(shared[size_t(MemoryUse::Buffer)], kOutputs * 4);
  EXPECT_EQ(shared[size_t(MemoryUse::OptimizerState)], 0); // SGD

  plan.optimizer.name = "adamw";
  auto device = staticBytes(plan, MemoryModel::Device);
  // Rows of rank 0: w1 2 of 3, w2 4 of 7, b 3 of 5, scale 1.
  int64_t trained = 2 * 7 + 4 * kOutputs + 3;
  EXPECT_EQ(device[size_t(MemoryUse::ParamShard)], (trained + 1) * 4);
  EXPECT_EQ(device[size_t(MemoryUse::OptimizerState)], 2 * trained * 4);
  EXPECT_EQ(device[size_t(MemoryUse::ReduceInput)], 0);
  // Rank 1 has what is left.
  EXPECT_EQ(staticBytes(plan, MemoryModel::Device,
                        1)[size_t(MemoryUse::OptimizerState)],
            2 * 4 * (7 + 3 * kOutputs + 2));
}

} // namespace
} // namespace fsdp::test
