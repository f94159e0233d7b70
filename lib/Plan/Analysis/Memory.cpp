//===- Memory.cpp - what a plan keeps in memory, and when -----------------===//
#include "fsdp/Plan/Memory.h"
#include "fsdp/Plan/Operands.h"
#include "fsdp/Plan/SegmentLayout.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace fsdp::plan {

std::string_view memoryUseName(MemoryUse use) {
  constexpr std::array<std::string_view, kNumMemoryUses> names = {
      "inputs",
      "activations",
      "temporaries",
      "gradients",
      "sums of gradients",
      "gradient shards",
      "gathered parameters",
      "parameter shards",
      "optimizer state",
      "buffers",
      "constants",
      "reduction inputs",
      "communication"};
  return names[size_t(use)];
}

const Instruction &instructionAt(const Plan &plan, int64_t position) {
  auto index = size_t(position);
  return index < plan.instructions.size()
             ? plan.instructions[index]
             : plan.evaluation[index - plan.instructions.size()];
}

namespace {

class Replay {
public:
  Replay(const Plan &plan, MemoryModel model)
      : plan(plan), onDevice(model == MemoryModel::Device),
        wraps(plan.accumulationSteps > 1), isGrad(plan.values.size()),
        isUsed(plan.values.size()), onHost(plan.values.size()),
        units(plan.units.size()) {
    memory.storageOf.assign(plan.values.size(), -1);
    memory.stepPositions = int64_t(plan.instructions.size());
    memory.positions = memory.stepPositions + int64_t(plan.evaluation.size());
  }

  Memory run() {
    if (!onDevice)
      segment.emplace(plan);
    for (const Instruction &instruction : plan.instructions)
      scan(instruction);
    for (int64_t i = 0; i < memory.stepPositions; ++i) {
      Phase phase = plan.instructions[size_t(i)].phase;
      if (phase == Phase::Forward)
        forwardEnd = i + 1;
      if (phase != Phase::Optimizer)
        microbatchEnd = i + 1;
    }
    replay(plan.instructions, 0);
    inEvaluation = true;
    replay(plan.evaluation, memory.stepPositions);
    return std::move(memory);
  }

private:
  /// What is gathered, copied or kept of a unit while the replay goes on.
  struct UnitState {
    std::vector<int32_t> gathered; ///< storages of its last gather
    /// Storages of the unit where it stays gathered over microbatches.
    std::vector<int32_t> staying;
    bool stays = false;
  };

  /// Notes which values are used at all, which are whole gradients, and which
  /// units stay gathered.
  void scan(const Instruction &instruction) {
    const auto &kind = instruction.kind;
    bool takesGrads = std::holds_alternative<ReduceScatter>(kind) ||
                      std::holds_alternative<Accumulate>(kind) ||
                      std::holds_alternative<OptimizerStep>(kind);
    for (ValueId value : getOperands(instruction)) {
      isUsed[value] = true;
      ValueId root = plan.values[value].storage;
      if (takesGrads)
        isGrad[root == -1 ? value : root] = true;
    }
    if (const auto *gather = std::get_if<AllGather>(&kind))
      units[gather->unit].stays |= instruction.when == When::First;
  }

  int32_t makeStorage(ValueId value, int64_t bytes, MemoryUse use) {
    if (bytes == 0)
      return -1;
    memory.storages.push_back({value,
                               alignTo(bytes, arenaAlign(plan)),
                               use,
                               position,
                               {{position, programEnd - 1}}});
    open.push_back(0);
    return int32_t(memory.storages.size()) - 1;
  }

  /// Defines a value; `use` is nullopt for one that lies elsewhere.
  void define(ValueId value, std::optional<MemoryUse> use) {
    if (value == -1)
      return;
    const Value &spec = plan.values[value];
    if (spec.storage != -1)
      memory.storageOf[value] = memory.storageOf[spec.storage];
    else if (use)
      memory.storageOf[value] = makeStorage(value, spec.numBytes(), *use);
    if (int32_t storage = memory.storageOf[value]; storage != -1)
      ++open[storage];
  }

  void free(ValueId value) {
    int32_t storage = memory.storageOf[value];
    if (storage == -1 || --open[storage] > 0)
      return;
    memory.storages[storage].lives.back().last = position;
  }

  void replay(const std::vector<Instruction> &instructions, int64_t begin) {
    position = begin;
    programEnd = begin + int64_t(instructions.size());
    if (instructions.empty())
      return;
    for (const Input &input : plan.inputs) {
      int32_t storage = memory.storageOf[input.value];
      if (storage != -1) {
        memory.storages[storage].lives.push_back({position, programEnd - 1});
        open[storage] = 1;
        continue;
      }
      define(input.value, MemoryUse::Input);
      if ((storage = memory.storageOf[input.value]) != -1)
        memory.storages[storage].definition = -1;
    }
    for (const Instruction &instruction : instructions) {
      current = &instruction;
      std::visit(
          [&](const auto &kind) {
            if constexpr (requires { visit(kind); })
              visit(kind);
            else
              defineResults(instruction);
          },
          instruction.kind);
      define(instruction.buffer, bufferUse(instruction));
      for (ValueId value : instruction.frees)
        free(value);
      ++position;
    }
    if (!inEvaluation)
      finishStep();
  }

  /// What lives into other microbatches; and what forward made for backward.
  void finishStep() {
    for (int32_t storage : sums) {
      Life &life = memory.storages[storage].lives.back();
      if (wraps)
        life = {0, std::max(life.last, microbatchEnd - 1)};
    }
    for (Storage &storage : memory.storages)
      if (storage.use == MemoryUse::Temporary &&
          storage.definition < forwardEnd &&
          storage.lives.back().last >= forwardEnd)
        storage.use = MemoryUse::Activation;
  }

  /// An instruction of a kind that needs no special treatment.
  void defineResults(const Instruction &instruction) {
    for (ValueId out : getResults(instruction))
      if (out != instruction.buffer)
        define(out, MemoryUse::Temporary);
  }

  void visit(const Call &call) {
    bool steered = call.reduceInputOf >= 0 && !onDevice && plan.shards() > 1;
    for (size_t i = 0; i < call.outs.size(); ++i) {
      ValueId out = call.outs[i];
      if (out == -1)
        continue;
      MemoryUse use = MemoryUse::Temporary;
      if (call.recompute)
        use = MemoryUse::Activation;
      else if (isGrad[out] && !inEvaluation)
        use = MemoryUse::Gradient;
      define(out,
             steered && i == 0 ? std::nullopt : std::optional<MemoryUse>(use));
    }
  }
  void visit(const ReadBuffer &read) { define(read.out, std::nullopt); }
  void visit(const ReadParam &read) { define(read.out, std::nullopt); }
  void visit(const Constant &constant) { define(constant.out, std::nullopt); }
  void visit(const LossScale &scale) { define(scale.out, std::nullopt); }

  void visit(const AllGather &gather) {
    UnitState &unit = units[gather.unit];
    if (!onDevice) {
      for (ValueId out : gather.outs)
        define(out, std::nullopt);
      return;
    }
    bool stays = unit.stays && !inEvaluation;
    // In later microbatches the results of a step's first gather are those of
    // its last.
    bool again = stays && !unit.staying.empty();
    for (size_t i = 0; i < gather.outs.size(); ++i) {
      int32_t param = plan.units[gather.unit].params[i];
      int32_t storage =
          again ? unit.staying[i]
                : makeStorage(gather.outs[i],
                              plan.params[param].computeSpec().numBytes(),
                              MemoryUse::GatheredParam);
      if (gather.outs[i] != -1)
        memory.storageOf[gather.outs[i]] = storage;
      unit.gathered.push_back(storage);
      if (stays && !again)
        unit.staying.push_back(storage);
      if (storage == -1)
        continue;
      open[storage] = 1; // until the reshard, whatever is freed
      std::vector<Life> &lives = memory.storages[storage].lives;
      if (again)
        lives.push_back({position, programEnd - 1});
      else if (stays)
        lives.back().first = 0;
    }
  }

  void visit(const Reshard &reshard) {
    UnitState &unit = units[reshard.unit];
    bool stays = current->when == When::Last;
    for (int32_t storage : std::exchange(unit.gathered, {}))
      if (storage != -1) {
        --open[storage];
        memory.storages[storage].lives.back().last =
            stays ? std::max(position, microbatchEnd - 1) : position;
      }
  }

  std::optional<MemoryUse> bufferUse(const Instruction &instruction) const {
    if (!onDevice)
      return std::nullopt;
    bool reduces = std::holds_alternative<ReduceScatter>(instruction.kind) ||
                   std::holds_alternative<AllReduce>(instruction.kind);
    return reduces ? MemoryUse::ReduceInput : MemoryUse::GatheredParam;
  }

  /// A reduction writes its result when it is finished, which is before the
  /// first use; what has none must not lie where others will.
  std::optional<MemoryUse> reducedUse(ValueId out) const {
    if (!isUsed[out])
      return std::nullopt;
    return MemoryUse::GradientShard;
  }

  void visit(const ReduceScatter &reduce) {
    for (size_t i = 0; i < reduce.outs.size(); ++i) {
      bool inSegment = segment && segment->reducedInPlace[reduce.params[i]];
      define(reduce.outs[i],
             inSegment ? std::nullopt : reducedUse(reduce.outs[i]));
    }
  }
  void visit(const AllReduce &reduce) {
    for (ValueId out : reduce.outs)
      define(out, reducedUse(out));
  }

  void visit(const CopyToHost &copy) {
    for (ValueId out : copy.outs) {
      define(out,
             onDevice ? std::nullopt : std::optional(MemoryUse::GradientShard));
      onHost[out] = onDevice;
    }
  }

  void visit(const OffloadActivation &offload) {
    define(offload.out, std::nullopt);
  }
  void visit(const ReloadActivation &reload) {
    for (ValueId out : reload.outs)
      define(out, MemoryUse::Activation);
  }

  void defineGrads(const std::vector<ValueId> &ins,
                   const std::vector<ValueId> &outs, MemoryUse use) {
    for (size_t i = 0; i < outs.size(); ++i) {
      onHost[outs[i]] = onHost[ins[i]];
      define(outs[i], onHost[ins[i]] ? std::nullopt : std::optional(use));
    }
  }
  void visit(const Accumulate &sum) {
    defineGrads(sum.ins, sum.outs, MemoryUse::GradientSum);
    for (ValueId out : sum.outs)
      if (int32_t storage = memory.storageOf[out]; storage != -1)
        sums.push_back(storage);
  }
  void visit(const Unscale &unscale) {
    defineGrads(unscale.ins, unscale.outs, MemoryUse::GradientShard);
  }
  void visit(const ClipGradNorm &clip) {
    defineGrads(clip.ins, clip.outs, MemoryUse::GradientShard);
  }

  const Plan &plan;
  const bool onDevice;
  /// Values can live from one microbatch into the next.
  const bool wraps;
  Memory memory;
  std::optional<SegmentLayout> segment;
  /// Per storage: values of it that are alive.
  std::vector<int32_t> open;
  /// Per value: whose storage is a whole gradient; that an instruction takes;
  /// that the host holds, of an offloaded unit.
  std::vector<bool> isGrad, isUsed, onHost;
  std::vector<UnitState> units;
  std::vector<int32_t> sums;
  const Instruction *current = nullptr;
  int64_t position = 0;
  int64_t programEnd = 0;
  /// The first positions after phase forward, and after backward.
  int64_t forwardEnd = 0;
  int64_t microbatchEnd = 0;
  bool inEvaluation = false;
};

} // namespace

Memory replayMemory(const Plan &plan, MemoryModel model) {
  return Replay(plan, model).run();
}

std::vector<int64_t> Memory::liveBytes() const {
  std::vector<int64_t> bytes(size_t(positions) + 1);
  for (const Storage &storage : storages)
    for (const Life &life : storage.lives) {
      bytes[size_t(life.first)] += storage.bytes;
      bytes[size_t(life.last) + 1] -= storage.bytes;
    }
  for (size_t i = 1; i < bytes.size(); ++i)
    bytes[i] += bytes[i - 1];
  bytes.pop_back();
  return bytes;
}

int64_t Memory::peakPosition() const {
  std::vector<int64_t> live = liveBytes();
  return std::max_element(live.begin(), live.end()) - live.begin();
}

BytesByUse Memory::usesAt(int64_t position) const {
  BytesByUse bytes{};
  for (int32_t index : aliveAt(position)) {
    const Storage &storage = storages[size_t(index)];
    bytes[size_t(storage.use)] += storage.bytes;
  }
  return bytes;
}

int64_t Memory::peakBytes() const {
  std::vector<int64_t> live = liveBytes();
  return live.empty() ? 0 : *std::max_element(live.begin(), live.end());
}

std::vector<int32_t> Memory::aliveAt(int64_t position) const {
  std::vector<int32_t> result;
  for (size_t s = 0; s < storages.size(); ++s)
    for (const Life &life : storages[s].lives)
      if (life.overlaps({position, position}))
        result.push_back(int32_t(s));
  std::sort(result.begin(), result.end(), [&](int32_t a, int32_t b) {
    return std::pair(-storages[a].bytes, a) < std::pair(-storages[b].bytes, b);
  });
  return result;
}

} // namespace fsdp::plan
