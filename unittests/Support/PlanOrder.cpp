//===- PlanOrder.cpp - what a plan's streams and events order -------------===//
#include "Support/PlanOrder.h"
#include "fsdp/Plan/Operands.h"

#include <algorithm>

namespace fsdp::test {

using namespace plan;

std::optional<Relation> orderOf(const std::vector<Instruction> &list) {
  size_t count = list.size();
  Relation before(count, std::vector<bool>(count));
  std::map<EventId, size_t> recorders;
  std::map<Stream, size_t> last;
  for (size_t i = 0; i < count; ++i) {
    auto after = [&](size_t other) {
      before[i][other] = true;
      for (size_t k = 0; k < other; ++k)
        if (before[other][k])
          before[i][k] = true;
    };
    if (auto it = last.find(list[i].stream); it != last.end())
      after(it->second);
    for (EventId event : list[i].waits) {
      auto it = recorders.find(event);
      if (it == recorders.end())
        return std::nullopt;
      after(it->second);
    }
    last[list[i].stream] = i;
    if (list[i].records != -1 && !recorders.emplace(list[i].records, i).second)
      return std::nullopt;
  }
  return before;
}

/// The steps' forward and backward twice, then the optimizer phase, as a plan
/// with microbatches runs them. `position` has where each copy comes from.
static std::vector<Instruction> unrolled(const Plan &plan,
                                         std::vector<size_t> &position) {
  std::vector<Instruction> list;
  EventId shift = 0;
  for (const Instruction &instruction : plan.instructions)
    shift = std::max(shift, instruction.records + 1);
  int rounds = plan.accumulationSteps > 1 ? 2 : 1;
  for (int round = 0; round < rounds; ++round)
    for (size_t i = 0; i < plan.instructions.size(); ++i) {
      Instruction instruction = plan.instructions[i];
      bool isLast = round == rounds - 1;
      if (instruction.phase == Phase::Optimizer && !isLast)
        continue;
      if (!isLast) {
        for (EventId &event : instruction.waits)
          event += shift;
        if (instruction.records != -1)
          instruction.records += shift;
      }
      list.push_back(std::move(instruction));
      position.push_back(i);
    }
  return list;
}

Dependences::Dependences(const Plan &plan) : plan(plan) {
  for (const Instruction &instruction : unrolled(plan, position)) {
    visit(instruction);
    ++now;
  }
  for (const auto &[thing, accesses] : touched)
    for (size_t a = 0; a < accesses.size(); ++a)
      for (size_t b = a + 1; b < accesses.size(); ++b)
        if (accesses[a].at != accesses[b].at &&
            (accesses[a].writes || accesses[b].writes))
          pairs.insert({accesses[a].at, accesses[b].at});
  addPlaces();
}

bool Dependences::holdIn(const Mutant &mutant) const {
  std::vector<size_t> places;
  std::vector<Instruction> list = unrolled(mutant.plan, places);
  std::optional<Relation> before = orderOf(list);
  if (!before)
    return false;
  // Where the instructions of the original's unrolled list are in it.
  std::vector<int> found(position.size(), -1);
  std::map<int, size_t> rounds;
  for (size_t i = 0; i < places.size(); ++i) {
    int origin = mutant.origin[places[i]];
    if (origin == -1)
      continue;
    size_t round = rounds[origin]++;
    for (size_t k = 0, seen = 0; k < position.size(); ++k)
      if (int(position[k]) == origin && seen++ == round)
        found[k] = int(i);
  }
  return std::all_of(pairs.begin(), pairs.end(), [&](const auto &pair) {
    int a = found[pair.first], b = found[pair.second];
    return a == -1 || b == -1 || (*before)[size_t(b)][size_t(a)];
  });
}

void Dependences::touch(Kind kind, int32_t index, bool writes) {
  touched[{kind, index}].push_back({now, writes});
}

ValueId Dependences::ownerOf(ValueId value) const {
  ValueId owner = plan.values[size_t(value)].storage;
  return owner == -1 ? value : owner;
}

void Dependences::visit(const Instruction &instruction) {
  for (ValueId value : getOperands(instruction))
    touch(Kind::Storage, ownerOf(value), false);
  if (const auto *call = std::get_if<Call>(&instruction.kind))
    for (ValueId value : call->mutates)
      touch(Kind::Storage, ownerOf(value), true);
  bool inPlace = std::holds_alternative<ClipGradNorm>(instruction.kind);
  for (ValueId value : getResults(instruction)) {
    bool writes = inPlace || ownerOf(value) == value;
    touch(Kind::Storage, ownerOf(value), writes);
    ++alive[ownerOf(value)];
  }
  if (const auto *offload = std::get_if<OffloadActivation>(&instruction.kind))
    onHost.insert(offload->out);
  if (const auto *gather = std::get_if<AllGather>(&instruction.kind)) {
    touch(Kind::Gathered, gather->unit, true);
    touch(Kind::Shards, gather->unit, false);
  } else if (const auto *end = std::get_if<Reshard>(&instruction.kind)) {
    touch(Kind::Gathered, end->unit, true);
  } else if (std::holds_alternative<OptimizerStep>(instruction.kind)) {
    for (size_t u = 0; u < plan.units.size(); ++u)
      touch(Kind::Shards, int32_t(u), true);
  }
  for (ValueId value : instruction.frees)
    if (--alive[ownerOf(value)] == 0)
      touch(Kind::Storage, ownerOf(value), true);
}

void Dependences::addPlaces() {
  struct Place {
    int64_t begin, end;
    bool onHost;
    const std::vector<Access> *accesses;
  };
  std::vector<Place> places;
  for (const auto &[thing, accesses] : touched)
    if (thing.first == Kind::Storage)
      if (const Value &value = plan.values[size_t(thing.second)];
          value.offset != -1)
        places.push_back({value.offset, value.offset + value.numBytes(),
                          onHost.contains(thing.second), &accesses});
  for (const Place &a : places)
    for (const Place &b : places) {
      if (&a == &b || a.onHost != b.onHost || a.begin >= b.end ||
          b.begin >= a.end)
        continue;
      // Every access of one comes before a later one's of the other.
      for (const Access &x : *a.accesses)
        for (const Access &y : *b.accesses)
          if (x.at < y.at && (x.writes || y.writes))
            pairs.insert({x.at, y.at});
    }
}

} // namespace fsdp::test
