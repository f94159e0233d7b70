//===- VerifyArena.cpp - storages and the places they have ----------------===//
#include "Verifier.h"
#include "fsdp/Plan/Memory.h"

#include <algorithm>
#include <map>
#include <string>

namespace fsdp::plan {

void Verifier::verifyStorage(ValueId value) {
  const Value &view = plan.values[value];
  auto failView = [&](const std::string &message) {
    fail("P23", "value " + std::to_string(value) + " is a view of value " +
                    std::to_string(view.storage) + message);
  };
  if (view.storage == -1) {
    ++states[value].alive;
    return;
  }
  checkIndex(view.storage, plan.values, "a value");
  ValueState &storage = states[view.storage];
  if (!storage.defined || view.storage == value)
    failView(", which is not defined before");
  if (plan.values[view.storage].storage != -1)
    failView(", which is itself a view");
  if (storage.alive == 0)
    failView(", of which nothing is alive");
  ++storage.alive;
  if (!current)
    failView(", expected an input to have its own storage");
  const auto &kind = current->kind;
  if (std::holds_alternative<Call>(kind) ||
      std::holds_alternative<ReloadActivation>(kind))
    return; // some views repeat elements
  if (!std::holds_alternative<ReduceScatter>(kind) &&
      !std::holds_alternative<Unscale>(kind) &&
      !std::holds_alternative<ClipGradNorm>(kind))
    failView(", expected its instruction to make storage of its own");
  if (view.numBytes() != plan.values[view.storage].numBytes())
    failView(", expected as many bytes");
}

namespace {

struct Place {
  ValueId value;
  int64_t begin;
  int64_t end;
  Life life;
};

} // namespace

std::optional<std::pair<ValueId, ValueId>> findOverlap(const Plan &plan,
                                                       const Memory &memory) {
  std::vector<Place> places;
  for (const Storage &storage : memory.storages)
    if (storage.value != -1 && plan.values[storage.value].offset != -1)
      for (const Life &life : storage.lives)
        places.push_back({storage.value, plan.values[storage.value].offset,
                          plan.values[storage.value].offset + storage.bytes,
                          life});
  std::sort(places.begin(), places.end(), [](const Place &a, const Place &b) {
    return a.life.first < b.life.first;
  });
  // In order of time, with the places that are taken by begin: disjoint, so
  // that only neighbours can overlap a new one.
  std::map<int64_t, const Place *> taken;
  std::multimap<int64_t, int64_t> ends; // last position -> begin
  for (const Place &place : places) {
    while (!ends.empty() && ends.begin()->first < place.life.first) {
      taken.erase(ends.begin()->second);
      ends.erase(ends.begin());
    }
    auto next = taken.lower_bound(place.begin);
    const Place *other = nullptr;
    if (next != taken.end() && next->first < place.end)
      other = next->second;
    else if (next != taken.begin() &&
             std::prev(next)->second->end > place.begin)
      other = std::prev(next)->second;
    if (other)
      return std::pair(other->value, place.value);
    taken.emplace(place.begin, &place);
    ends.emplace(place.life.last, place.begin);
  }
  return std::nullopt;
}

void Verifier::verifyArena() const {
  auto name = [](ValueId value) { return "value " + std::to_string(value); };
  for (size_t v = 0; v < plan.values.size(); ++v) {
    int64_t offset = plan.values[v].offset;
    if (states[v].hostOf != -1)
      continue; // P33
    if (offset != -1 && !plan.arena)
      fail("P24", name(ValueId(v)) + " has an offset but there is no arena");
    if (offset != -1 && offset % arenaAlign(plan) != 0)
      fail("P24", "expected the offset of " + name(ValueId(v)) +
                      " to be a multiple of " +
                      std::to_string(arenaAlign(plan)) + ", got " +
                      std::to_string(offset) +
                      (offset % kTensorAlign == 0
                           ? ": compile the plan for the GPU again"
                           : ""));
  }
  if (!plan.arena) {
    if (plan.memoryBudget)
      fail("P31", "there is a memory_budget but no arena");
    return;
  }
  verifyBuffersOfArena();
  Memory memory = replayMemory(plan, arenaModel(plan));
  for (size_t v = 0; v < plan.values.size(); ++v) {
    const Value &value = plan.values[v];
    if (value.offset == -1 || states[v].hostOf != -1)
      continue;
    int32_t storage = memory.storageOf[v];
    if (value.storage != -1 || storage == -1)
      fail("P24", name(ValueId(v)) +
                      " has an offset but no storage of its own in the arena");
    if (int64_t bytes = memory.storages[storage].bytes;
        bytes > plan.arena->bytes - value.offset)
      fail("P24",
           "expected " + name(ValueId(v)) + " to end within the " +
               std::to_string(plan.arena->bytes) + " bytes of the arena, got " +
               std::to_string(value.offset) + " + " + std::to_string(bytes));
  }
  if (auto values = findOverlap(plan, memory))
    fail("P25", name(values->first) + " and " + name(values->second) +
                    " are alive at the same time and have bytes of the arena "
                    "in common");

  if (int64_t most = memory.peakBytes(); plan.arena->lowerBound != most)
    fail("P24", "expected a lower_bound of " + std::to_string(most) +
                    " bytes, the most that are alive at once, got " +
                    std::to_string(plan.arena->lowerBound));
  if (plan.memoryBudget)
    verifyBudget(memory);
}

void Verifier::verifyBudget(const Memory &memory) const {
  MemoryModel model = arenaModel(plan);
  int64_t peak = peakBytes(plan, model);
  if (peak <= *plan.memoryBudget)
    return;
  auto uses = usesAtPeak(plan, memory, model);
  std::string held;
  for (size_t i = 0; i < 3; ++i)
    held += (i ? ", " : "") + std::string(memoryUseName(uses[i].second)) + " " +
            std::to_string(uses[i].first);
  fail("P31", "expected a peak of at most the memory_budget of " +
                  std::to_string(*plan.memoryBudget) + " bytes a rank, got " +
                  std::to_string(peak) + ", " +
                  std::to_string(plan.arena->bytes) +
                  " of them the arena's; at the peak " + held);
}

} // namespace fsdp::plan
