//===- StaticMemory.cpp - what a rank keeps all the time ------------------===//
#include "fsdp/Plan/Memory.h"
#include "fsdp/Plan/SegmentLayout.h"

#include <algorithm>
#include <numeric>

namespace fsdp::plan {

namespace {

/// Tensors of a parameter's size that its optimizer keeps; of an external one,
/// the gradient that it is handed.
int64_t numStates(const Optimizer &optimizer) {
  if (optimizer.name == "sgd")
    return optimizer.momentum != 0 ? 1 : 0;
  if (optimizer.name == "adam" || optimizer.name == "adamw")
    return optimizer.amsgrad ? 3 : 2;
  return optimizer.isExternal() ? 1 : 0;
}

class StaticMemory {
public:
  StaticMemory(const Plan &plan, MemoryModel model, int64_t rank)
      : plan(plan), onDevice(model == MemoryModel::Device),
        index(plan.shardIndex(rank)) {}

  BytesByUse run() {
    if (onDevice)
      addShards();
    else
      addSegment();
    for (const Param &param : plan.params)
      if (param.unit == -1)
        add(MemoryUse::ParamShard, param.spec.numBytes());
    for (const Buffer &buffer : plan.buffers)
      add(MemoryUse::Buffer, buffer.spec.numBytes());
    for (const auto *program : {&plan.instructions, &plan.evaluation})
      for (const Instruction &instruction : *program) {
        if (const auto *constant = std::get_if<Constant>(&instruction.kind))
          add(MemoryUse::Constant, plan.values[constant->out].numBytes());
        else if (const auto *step =
                     std::get_if<OptimizerStep>(&instruction.kind))
          addOptimizer(*step);
      }
    return bytes;
  }

private:
  void add(MemoryUse use, int64_t more) { bytes[size_t(use)] += more; }

  bool isElsewhere(const Param &param) const {
    return onDevice && param.unit != -1 && plan.units[param.unit].cpuOffload;
  }

  void addShards() {
    for (size_t p = 0; p < plan.params.size(); ++p)
      if (plan.params[p].unit != -1 && !isElsewhere(plan.params[p]))
        add(MemoryUse::ParamShard,
            shardSpec(plan, int32_t(p), index).numBytes());
  }

  void addSegment() {
    SegmentLayout layout(plan);
    auto ranks = plan.worldSize;
    int64_t kept = 0;
    for (const SegmentLayout::KeptPlace &place : layout.kept)
      if (place.group != 0)
        kept += int64_t(place.stride) * (ranks / place.group);
    add(MemoryUse::ParamShard,
        int64_t(layout.replicaBytes) * plan.replicas / ranks);
    add(MemoryUse::GatheredParam, kept / ranks);
    add(MemoryUse::ReduceInput, int64_t(layout.areaBytes));
    add(MemoryUse::Communication, 2 * int64_t(layout.vectorBytes));
    // The optimizer needs them row-major.
    for (size_t p = 0; p < plan.params.size(); ++p)
      if (plan.params[p].unit != -1 && plan.params[p].shardDim != 0 &&
          plan.shards() > 1)
        add(MemoryUse::ParamShard,
            shardSpec(plan, int32_t(p), index).numBytes());
  }

  void addOptimizer(const OptimizerStep &step) {
    for (size_t i = 0; i < step.params.size(); ++i) {
      if (isElsewhere(plan.params[step.params[i]]))
        continue;
      int32_t group = step.groups.empty() ? 0 : step.groups[i];
      const Optimizer &settings =
          group == 0 ? plan.optimizer : plan.paramGroups[size_t(group) - 1];
      add(MemoryUse::OptimizerState,
          numStates(settings) *
              shardSpec(plan, step.params[i], index).numBytes());
    }
  }

  const Plan &plan;
  const bool onDevice;
  const int64_t index;
  BytesByUse bytes{};
};

} // namespace

BytesByUse staticBytes(const Plan &plan, MemoryModel model, int64_t rank) {
  return StaticMemory(plan, model, rank).run();
}

int64_t sum(const BytesByUse &bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
}

std::vector<std::pair<int64_t, MemoryUse>>
usesAtPeak(const Plan &plan, const Memory &memory, MemoryModel model) {
  BytesByUse alive = memory.usesAt(memory.peakPosition());
  BytesByUse always = staticBytes(plan, model);
  std::vector<std::pair<int64_t, MemoryUse>> uses;
  for (size_t use = 0; use < kNumMemoryUses; ++use)
    uses.emplace_back(alive[use] + always[use], MemoryUse(use));
  std::sort(uses.rbegin(), uses.rend());
  return uses;
}

int64_t peakBytes(const Plan &plan, MemoryModel model) {
  return sum(staticBytes(plan, model)) + (plan.arena ? plan.arena->bytes : 0);
}

} // namespace fsdp::plan
