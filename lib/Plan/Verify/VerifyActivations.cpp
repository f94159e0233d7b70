//===- VerifyActivations.cpp - activations on the host --------------------===//
#include "Verifier.h"
#include "fsdp/Plan/Memory.h"

namespace fsdp::plan {

static std::string name(ValueId value) {
  return "value " + std::to_string(value);
}

void Verifier::useOnDevice(ValueId value) const {
  if (states[value].hostOf != -1 &&
      !(current && std::holds_alternative<ReloadActivation>(current->kind)))
    fail("P32", name(value) + " is on the host and is used without a "
                              "reload_activation");
  ValueId storage = plan.values[value].storage;
  if (states[storage == -1 ? value : storage].offloaded)
    fail("P32", name(value) + " is used on the device after its "
                              "offload_activation");
}

void Verifier::visit(const OffloadActivation &offload) {
  if (offload.ins.empty())
    fail("P32", "expected an offload_activation of at least one value");
  for (ValueId in : offload.ins)
    useOperand(in);
  ValueId owner = offload.ins.front();
  if (plan.values[owner].storage != -1 || states[owner].gatheredFrom != -1)
    fail("P32", "expected an offload_activation of a storage that a call made, "
                "got " +
                    name(owner) + " first");
  for (ValueId in : offload.ins)
    if (in != owner && plan.values[in].storage != owner)
      fail("P32", "expected values of the storage of " + name(owner) +
                      " in one offload_activation, got " + name(in));
  define(offload.out);
  checkSpec(offload.out, plan.values[owner], "P32", "on the host");
  states[owner].offloaded = true;
  states[offload.out].hostOf = position;
}

void Verifier::visit(const ReloadActivation &reload) {
  use(reload.host);
  int64_t source = states[reload.host].hostOf;
  if (source == -1)
    fail("P32", "expected a reload_activation of what an offload_activation "
                "copied to the host, got " +
                    name(reload.host));
  const auto &ins =
      std::get<OffloadActivation>(plan.instructions[size_t(source)].kind).ins;
  checkSize(reload.outs.size(), ins.size(), "results");
  for (size_t i = 0; i < ins.size(); ++i) {
    ValueId out = reload.outs[i];
    define(out);
    checkSpec(out, plan.values[ins[i]], "P32", "reloaded");
    ValueId storage = i == 0 ? -1 : reload.outs[0];
    if (plan.values[out].storage != storage)
      fail("P32", "expected the results of a reload_activation to share the "
                  "storage of the first, got " +
                      name(out));
  }
}

void Verifier::verifyHostArena() const {
  Memory memory = replayHostMemory(plan);
  if (memory.storages.empty() && plan.hostArena)
    fail("P33", "expected no host_arena where nothing is offloaded");
  for (const Storage &storage : memory.storages) {
    int64_t offset = plan.values[storage.value].offset;
    if (!plan.hostArena && offset != -1)
      fail("P33", name(storage.value) + " has an offset but there is no "
                                        "host_arena");
    if (!plan.hostArena)
      continue;
    if (offset < 0 || offset % kTensorAlign != 0 ||
        storage.bytes > plan.hostArena->bytes - offset)
      fail("P33", "expected " + name(storage.value) + " of " +
                      std::to_string(storage.bytes) +
                      " bytes at a multiple of " +
                      std::to_string(kTensorAlign) + " within the " +
                      std::to_string(plan.hostArena->bytes) +
                      " bytes of host_arena, got " + std::to_string(offset));
  }
  if (!plan.hostArena)
    return;
  if (auto values = findOverlap(plan, memory))
    fail("P33", name(values->first) + " and " + name(values->second) +
                    " are alive at the same time and have bytes of host_arena "
                    "in common");
  if (int64_t most = memory.peakBytes(); plan.hostArena->lowerBound != most)
    fail("P33", "expected a lower_bound of " + std::to_string(most) +
                    " bytes, the most that are alive at once, got " +
                    std::to_string(plan.hostArena->lowerBound));
}

} // namespace fsdp::plan
