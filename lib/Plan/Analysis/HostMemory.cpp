//===- HostMemory.cpp - offloaded activations on the host -----------------===//
#include "fsdp/Plan/Memory.h"

namespace fsdp::plan {

Memory replayHostMemory(const Plan &plan) {
  Memory memory;
  memory.stepPositions = int64_t(plan.instructions.size());
  memory.positions = memory.stepPositions + int64_t(plan.evaluation.size());
  memory.storageOf.assign(plan.values.size(), -1);
  for (int64_t i = 0; i < memory.stepPositions; ++i) {
    const Instruction &instruction = plan.instructions[size_t(i)];
    if (const auto *offload =
            std::get_if<OffloadActivation>(&instruction.kind)) {
      int64_t bytes = alignTo(plan.values[offload->out].numBytes());
      if (bytes > 0) {
        memory.storageOf[offload->out] = int32_t(memory.storages.size());
        memory.storages.push_back({offload->out,
                                   bytes,
                                   MemoryUse::Activation,
                                   i,
                                   {{i, memory.stepPositions - 1}}});
      }
    }
    for (ValueId value : instruction.frees)
      if (int32_t storage = memory.storageOf[value]; storage != -1)
        memory.storages[storage].lives.back().last = i;
  }
  return memory;
}

} // namespace fsdp::plan
