//===- VerifyBuffers.cpp - memory of collectives beside their results -----===//
#include "Verifier.h"
#include "fsdp/Plan/DeviceBuffers.h"

namespace fsdp::plan {

void Verifier::verifyBuffer(const Instruction &instruction) {
  std::optional<TensorSpec> want =
      hasBuffers ? bufferSpec(plan, instruction) : std::nullopt;
  ValueId buffer = instruction.buffer;
  if (!want && buffer != -1)
    fail("P34", "expected no buffer, got value " + std::to_string(buffer));
  if (want && buffer == -1)
    fail("P34", "expected a buffer of " + describe(*want) +
                    ", as others have one, got none");
  if (want) {
    define(buffer);
    checkSpec(buffer, *want, "P34", "a buffer");
    if (plan.values[buffer].storage != -1)
      fail("P34", "expected buffer " + std::to_string(buffer) +
                      " to have storage of its own");
    states[buffer].isBuffer = true;
  }
  if (const auto *gather = std::get_if<AllGather>(&instruction.kind))
    verifySource(*gather);
  else if (const auto *copy = std::get_if<CopyToDevice>(&instruction.kind))
    sources[copy->unit] = buffer;
  else if (const auto *reshard = std::get_if<Reshard>(&instruction.kind))
    sources[reshard->unit] = buffer;
}

void Verifier::verifySource(const AllGather &gather) {
  ValueId want = sources[gather.unit];
  if (gather.source != want)
    fail("P34", "expected unit " + quote(plan.units[gather.unit].name) +
                    " to be gathered from " + bufferName(want) + ", got " +
                    bufferName(gather.source));
  sources[gather.unit] = -1;
  if (want != -1 && states[want].freed)
    fail("P4", "value " + std::to_string(want) + " is used after it is freed");
}

void Verifier::verifyBuffersOfArena() const {
  if (hasBuffers || !plan.arena || arenaModel(plan) != MemoryModel::Device)
    return;
  for (const auto *list : {&plan.instructions, &plan.evaluation})
    for (size_t i = 0; i < list->size(); ++i)
      if (auto want = bufferSpec(plan, (*list)[i]))
        fail("P34", std::string(list == &plan.evaluation ? "evaluation["
                                                         : "instructions[") +
                        std::to_string(i) + "]: expected a buffer of " +
                        describe(*want) +
                        ", as the arena is a device's, got none: compile the "
                        "model again");
}

std::string Verifier::bufferName(ValueId buffer) {
  return buffer == -1 ? "its shards" : "buffer " + std::to_string(buffer);
}

} // namespace fsdp::plan
