//===- MutationTest.cpp - every mutant of compiled plans is caught --------===//
//
// Compiled plans, each changed in one place in every way of a list. verifyPlan
// must refuse a mutant, or the mutant must be the same program.
//
// A mutant that changes nothing but order (streams, events, places in the list)
// is the same program if it orders every two instructions that touch one thing,
// of which one writes it, as the original does (PlanOrder.h).
//
//===----------------------------------------------------------------------===//
#include "Support/PlanMutations.h"
#include "Support/PlanOrder.h"
#include "Support/Sanitizers.h"
#include "fsdp/Plan/Memory.h"
#include "fsdp/Plan/ModelCollectives.h"
#include "fsdp/Plan/Operands.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <regex>
#include <set>

namespace fsdp::test {
namespace {

using namespace plan;

/// The mutants of one plan.
class Corpus {
public:
  Corpus(const std::string &name)
      : name(name), plan(readPlan(FSDP_TEST_INPUTS "/plans/" + name + ".json")),
        dependences(plan), memory(replayMemory(plan, arenaModel(plan))) {}

  void run() {
    ASSERT_TRUE(dependences.holdIn(whole())) << name;
    order();
    pairsOfWaits();
    lives();
    writes();
    places();
    budgets();
    placesOnTheHost();
    indices();
    axes();
    for (const auto &[what, count] : counts)
      std::printf("[ mutants  ] %s, %s: %d of %d caught%s\n", name.c_str(),
                  what.c_str(), count.caught, count.all,
                  count.same == 0 ? ""
                                  : (", " + std::to_string(count.same) +
                                     " the same program")
                                        .c_str());
  }

private:
  struct Count {
    int all = 0, caught = 0, same = 0;
  };

  Mutant whole() const {
    Mutant mutant{plan, std::vector<int>(plan.instructions.size())};
    std::iota(mutant.origin.begin(), mutant.origin.end(), 0);
    return mutant;
  }

  /// Counts one; `same` decides whether it may pass.
  template <typename Same>
  void expect(const char *what, const Plan &mutant, const std::string &where,
              Same same) {
    Count &count = counts[what];
    ++count.all;
    try {
      verifyPlan(mutant, "m.json");
    } catch (const PlanError &error) {
      static const std::regex label(" \\(P[0-9]+\\)$");
      EXPECT_TRUE(std::regex_search(error.what(), label)) << error.what();
      ++count.caught;
      return;
    }
    if (same())
      ++count.same;
    else
      ADD_FAILURE() << name << ", " << what << ", " << where << ": not caught";
  }
  void expectCaught(const char *what, const Plan &mutant,
                    const std::string &where) {
    expect(what, mutant, where, [] { return false; });
  }
  void expectOrdered(const char *what, const Mutant &mutant,
                     const std::string &where) {
    expect(what, mutant.plan, where,
           [&] { return dependences.holdIn(mutant); });
  }
  static std::string at(size_t i) {
    return "instructions[" + std::to_string(i) + "]";
  }
  std::vector<Instruction> &list(Mutant &mutant) const {
    return mutant.plan.instructions;
  }

  //===--------------------------------------------------------------------===//
  // Order
  //===--------------------------------------------------------------------===//

  void order() {
    const std::vector<Instruction> &original = plan.instructions;
    std::map<Stream, size_t> before;
    for (size_t i = 0; i < original.size(); ++i) {
      const Instruction &instruction = original[i];
      for (size_t k = 0; k < instruction.waits.size(); ++k) {
        Mutant mutant = whole();
        auto &waits = list(mutant)[i].waits;
        waits.erase(waits.begin() + long(k));
        expectOrdered("waits dropped", mutant, at(i));
      }
      if (instruction.records != -1) {
        Mutant mutant = whole();
        for (Instruction &other : list(mutant))
          std::erase(other.waits, instruction.records);
        expectOrdered("events deleted", mutant, at(i));
        mutant = whole();
        list(mutant)[i].records = -1;
        expectOrdered("records deleted", mutant, at(i));
      }
      if (std::holds_alternative<Wait>(instruction.kind) &&
          i + 1 < original.size()) {
        Mutant mutant = whole();
        std::swap(list(mutant)[i], list(mutant)[i + 1]);
        std::swap(mutant.origin[i], mutant.origin[i + 1]);
        // A program may run on without it, but phases must not mix.
        expectOrdered("waits one instruction later", mutant, at(i));
      }
      Stream stream = instruction.stream;
      if (stream == Stream::Compute)
        continue;
      if (auto it = before.find(stream); it != before.end()) {
        size_t other = it->second;
        Mutant mutant = whole();
        std::swap(list(mutant)[other], list(mutant)[i]);
        std::swap(mutant.origin[other], mutant.origin[i]);
        expectOrdered("collectives swapped", mutant, at(other) + ", " + at(i));
        mutant = whole();
        std::swap(list(mutant)[other].kind, list(mutant)[i].kind);
        std::swap(list(mutant)[other].buffer, list(mutant)[i].buffer);
        std::swap(mutant.origin[other], mutant.origin[i]);
        expectOrdered("collectives swapped between their events", mutant,
                      at(other) + ", " + at(i));
      }
      before[stream] = i;
      for (size_t s = 0; s < kNumStreams; ++s)
        if (Stream(s) != stream) {
          Mutant mutant = whole();
          list(mutant)[i].stream = Stream(s);
          expectOrdered("streams changed", mutant, at(i));
        }
    }
  }

  /// One wait may be implied by another until that is gone too.
  void pairsOfWaits() {
    std::vector<std::pair<size_t, EventId>> waits;
    for (size_t i = 0; i < plan.instructions.size(); ++i)
      for (EventId event : plan.instructions[i].waits)
        waits.push_back({i, event});
    for (size_t a = 0; a < waits.size(); ++a)
      for (size_t b = a + 1; b < waits.size(); ++b) {
        Mutant mutant = whole();
        for (const auto &[i, event] : {waits[a], waits[b]})
          std::erase(list(mutant)[i].waits, event);
        expectOrdered("pairs of waits dropped", mutant,
                      at(waits[a].first) + ", " + at(waits[b].first));
      }
  }

  //===--------------------------------------------------------------------===//
  // Lives
  //===--------------------------------------------------------------------===//

  void lives() {
    const std::vector<Instruction> &original = plan.instructions;
    std::vector<int> lastUse(plan.values.size(), -1);
    for (size_t i = 0; i < original.size(); ++i) {
      for (ValueId value : getOperands(original[i]))
        lastUse[size_t(value)] = int(i);
      for (size_t k = 0; k < original[i].frees.size(); ++k)
        freedEarlier(i, k, lastUse[size_t(original[i].frees[k])]);
    }
  }

  /// Whether the instruction frees another value of the same storage.
  bool isHeldBeside(ValueId value, size_t freed) const {
    auto ownerOf = [&](ValueId id) {
      ValueId owner = plan.values[size_t(id)].storage;
      return owner == -1 ? id : owner;
    };
    const std::vector<ValueId> &frees = plan.instructions[freed].frees;
    return std::any_of(frees.begin(), frees.end(), [&](ValueId other) {
      return other != value && ownerOf(other) == ownerOf(value);
    });
  }

  void freedEarlier(size_t freed, size_t k, int lastUse) {
    ValueId value = plan.instructions[freed].frees[k];
    auto isCompute = [&](int i) {
      return plan.instructions[size_t(i)].stream == Stream::Compute;
    };
    auto freeAt = [&](int i) {
      Mutant mutant = whole();
      auto &frees = list(mutant)[freed].frees;
      frees.erase(frees.begin() + long(k));
      list(mutant)[size_t(i)].frees.push_back(value);
      return mutant;
    };
    int earlier = lastUse - 1;
    while (earlier >= 0 && !isCompute(earlier))
      --earlier;
    if (earlier >= 0)
      expectCaught("freed before the last use", freeAt(earlier).plan,
                   at(freed));
    // Between the last use, on another stream, and what waits for it.
    if (lastUse >= 0 && !isCompute(lastUse)) {
      earlier = int(freed) - 1;
      while (earlier > lastUse && !isCompute(earlier))
        --earlier;
      if (earlier > lastUse) {
        Mutant mutant = freeAt(earlier);
        auto before = orderOf(list(mutant));
        expect("freed one instruction earlier, read on another stream",
               mutant.plan, at(freed), [&] {
                 // Another value may hold the storage up to there.
                 return isHeldBeside(value, freed) ||
                        (before && (*before)[size_t(earlier)][size_t(lastUse)]);
               });
      }
    }
    Mutant mutant = whole();
    Instruction use{Call{{"aten::detach", ""}, {{TensorArg{value}}}, {-1}},
                    plan.instructions[freed].phase};
    list(mutant).insert(list(mutant).begin() + long(freed) + 1, use);
    expectCaught("used after the free", mutant.plan, at(freed));
  }

  //===--------------------------------------------------------------------===//
  // Writes
  //===--------------------------------------------------------------------===//

  /// A call that reads a parameter, or a view of one, writes it.
  void writes() {
    std::set<ValueId> params;
    for (const auto *list : {&plan.instructions, &plan.evaluation})
      for (const Instruction &instruction : *list)
        if (const auto *gather = std::get_if<AllGather>(&instruction.kind))
          params.insert(gather->outs.begin(), gather->outs.end());
    for (auto list : {&Plan::instructions, &Plan::evaluation})
      for (size_t i = 0; i < (plan.*list).size(); ++i) {
        const Instruction &instruction = (plan.*list)[i];
        if (!std::holds_alternative<Call>(instruction.kind))
          continue;
        for (ValueId value : getOperands(instruction)) {
          ValueId storage = plan.values[size_t(value)].storage;
          if (!params.contains(storage == -1 ? value : storage))
            continue;
          Plan mutant = plan;
          std::get<Call>((mutant.*list)[i].kind).mutates.push_back(value);
          expectCaught("parameters written", mutant, at(i));
        }
      }
  }

  //===--------------------------------------------------------------------===//
  // Places
  //===--------------------------------------------------------------------===//

  static bool together(const Storage &a, const Storage &b) {
    for (const Life &life : a.lives)
      for (const Life &other : b.lives)
        if (life.overlaps(other))
          return true;
    return false;
  }

  void places() {
    constexpr int kEach = 6; // neighbours that a storage is put on
    for (const Storage &a : memory.storages) {
      if (a.value == -1)
        continue;
      std::string where = "value " + std::to_string(a.value);
      int tried = 0;
      for (const Storage &b : memory.storages) {
        if (&a == &b || b.value == -1 || !together(a, b) || tried == kEach)
          continue;
        ++tried;
        Plan mutant = plan;
        mutant.values[size_t(a.value)].offset =
            plan.values[size_t(b.value)].offset;
        expectCaught("storages put on one that is alive", mutant, where);
      }
      Plan mutant = plan;
      mutant.values[size_t(a.value)].offset += kTensorAlign / 2;
      expectCaught("offsets not aligned", mutant, where);
      mutant = plan;
      std::vector<int64_t> &shape = mutant.values[size_t(a.value)].shape;
      shape.insert(shape.begin(), 2);
      expect("storages twice as large", mutant, where,
             [&] { return fits(mutant); });
    }
    for (int64_t bytes : {plan.arena->bytes - kTensorAlign, int64_t(0)}) {
      Plan mutant = plan;
      mutant.arena->bytes = bytes;
      mutant.arena->lowerBound = std::min(bytes, mutant.arena->lowerBound);
      expectCaught("arena too small", mutant, "");
    }
    Plan mutant = plan;
    mutant.arena.reset();
    expectCaught("arena too small", mutant, "");
    for (int64_t more : {-kTensorAlign, kTensorAlign}) {
      mutant = plan;
      mutant.arena->lowerBound += more;
      expectCaught("lower bound changed", mutant, "");
    }
  }

  void placesOnTheHost() {
    Memory host = replayHostMemory(plan);
    for (const Storage &a : host.storages) {
      std::string where = "value " + std::to_string(a.value);
      for (const Storage &b : host.storages) {
        if (&a == &b || !together(a, b))
          continue;
        Plan mutant = plan;
        mutant.values[size_t(a.value)].offset =
            plan.values[size_t(b.value)].offset;
        expectCaught("activations put on one that is on the host", mutant,
                     where);
      }
      Plan mutant = plan;
      mutant.values[size_t(a.value)].offset = plan.hostArena->bytes;
      expectCaught("activations put behind the host's arena", mutant, where);
    }
    for (size_t i = 0; i < plan.instructions.size(); ++i)
      if (const auto *offload =
              std::get_if<OffloadActivation>(&plan.instructions[i].kind)) {
        Plan mutant = plan;
        for (Instruction &other : mutant.instructions)
          if (auto *reload = std::get_if<ReloadActivation>(&other.kind);
              reload && reload->host == offload->out)
            reload->host = offload->ins[0];
        expectCaught("reloads of what is on the device", mutant, at(i));
        mutant = plan;
        for (Instruction &other : mutant.instructions)
          std::erase(other.frees, offload->ins[0]);
        mutant.instructions.insert(
            mutant.instructions.begin() + long(i) + 1,
            {Call{{"aten::detach", ""}, {{TensorArg{offload->ins[0]}}}, {-1}},
             plan.instructions[i].phase});
        expectCaught("uses on the device while on the host", mutant, at(i));
      }
  }

  /// A plan does not say which shape an operator gives: what is larger and has
  /// room is another plan that holds.
  static bool fits(const Plan &mutant) {
    Memory memory = replayMemory(mutant, arenaModel(mutant));
    const std::vector<Storage> &all = memory.storages;
    for (size_t a = 0; a < all.size(); ++a) {
      if (all[a].value == -1)
        continue;
      int64_t begin = mutant.values[size_t(all[a].value)].offset;
      if (begin + all[a].bytes > mutant.arena->bytes)
        return false;
      for (size_t b = a + 1; b < all.size(); ++b) {
        if (all[b].value == -1)
          continue;
        int64_t other = mutant.values[size_t(all[b].value)].offset;
        if (begin < other + all[b].bytes && other < begin + all[a].bytes &&
            together(all[a], all[b]))
          return false;
      }
    }
    return true;
  }

  //===--------------------------------------------------------------------===//
  // The budget
  //===--------------------------------------------------------------------===//

  static int64_t peakOf(const Plan &plan) {
    return peakBytes(plan, arenaModel(plan));
  }

  /// Of a plan that its budget just holds.
  void budgets() {
    Plan tight = plan;
    tight.memoryBudget = peakOf(plan);
    ASSERT_NO_THROW(verifyPlan(tight, "m.json")) << name;
    for (int64_t less : {int64_t(1), kTensorAlign, *tight.memoryBudget / 2,
                         *tight.memoryBudget - 1}) {
      Plan mutant = tight;
      *mutant.memoryBudget -= less;
      expectCaught("budget below the peak", mutant, std::to_string(less));
    }
    for (size_t b = 0; b < plan.buffers.size(); ++b) {
      Plan mutant = tight;
      grow(mutant.buffers[b].spec);
      for (auto *list : {&mutant.instructions, &mutant.evaluation})
        for (const Instruction &instruction : *list)
          if (const auto *read = std::get_if<ReadBuffer>(&instruction.kind);
              read && read->buffer == int32_t(b))
            grow(mutant.values[size_t(read->out)]);
      expectCaught("buffers grown", mutant, mutant.buffers[b].name);
    }
    // Everything has a place again, so that nothing but the budget is amiss.
    for (const Storage &storage : memory.storages) {
      if (storage.value == -1)
        continue;
      Plan mutant = tight;
      grow(mutant.values[size_t(storage.value)]);
      layOutArena(mutant, arenaModel(plan));
      expect("storages grown and laid out again", mutant,
             "value " + std::to_string(storage.value),
             [&] { return peakOf(mutant) <= *tight.memoryBudget; });
    }
  }

  static void grow(TensorSpec &spec) {
    spec.shape.insert(spec.shape.begin(), 2);
  }

  //===--------------------------------------------------------------------===//
  // Indices
  //===--------------------------------------------------------------------===//

  void indices() {
    for (size_t i = 0; i < plan.instructions.size(); ++i)
      std::visit(
          [&](const auto &kind) {
            if constexpr (requires { kind.unit; })
              otherUnits(i, kind);
            if constexpr (requires { kind.params; })
              otherParams(i, kind);
          },
          plan.instructions[i].kind);
  }

  template <typename Kind> void otherUnits(size_t i, const Kind &kind) {
    for (int32_t unit = -1; unit <= int32_t(plan.units.size()); ++unit)
      if (unit != kind.unit) {
        Plan mutant = plan;
        std::get<Kind>(mutant.instructions[i].kind).unit = unit;
        expectCaught("units changed", mutant, at(i));
      }
  }

  template <typename Kind> void otherParams(size_t i, const Kind &kind) {
    for (size_t k = 0; k < kind.params.size(); ++k) {
      Plan mutant = plan;
      auto &params = std::get<Kind>(mutant.instructions[i].kind).params;
      std::swap(params[k], params[(k + 1) % params.size()]);
      expectCaught("parameters swapped", mutant, at(i));
      for (int32_t other : {-1, int32_t(plan.params.size())}) {
        params = kind.params;
        params[k] = other;
        expectCaught("parameters out of range", mutant, at(i));
      }
    }
  }

  //===--------------------------------------------------------------------===//
  // Axes of the model
  //===--------------------------------------------------------------------===//

  void axes() {
    if (!plan.modelParallel)
      return;
    for (size_t a = 0; a < plan.modelParallel->axes.size(); ++a) {
      Mutant mutant = whole();
      auto &of = mutant.plan.modelParallel->axes;
      of.erase(of.begin() + long(a));
      expectCaught("axes dropped", mutant.plan, std::to_string(a));
      mutant = whole();
      mutant.plan.modelParallel->axes[a].name += "2";
      expectCaught("axes renamed", mutant.plan, std::to_string(a));
      mutant = whole();
      mutant.plan.modelParallel->axes[a].ranks *= 2;
      expectCaught("axes with more ranks", mutant.plan, std::to_string(a));
    }
    for (size_t i = 0; i < plan.instructions.size(); ++i) {
      const auto *call = std::get_if<Call>(&plan.instructions[i].kind);
      if (!call || !isModelCollective(call->op))
        continue;
      for (size_t k = 0; k < call->args.size(); ++k) {
        Mutant mutant = whole();
        auto &args = std::get<Call>(list(mutant)[i].kind).args;
        if (auto *number = std::get_if<int64_t>(&args[k].value)) {
          ++*number;
          expectCaught("collectives of the model over more ranks", mutant.plan,
                       at(i));
        } else if (k + 1 == call->args.size()) {
          args[k].value = std::string("data");
          expectCaught("collectives of the model over no axis", mutant.plan,
                       at(i));
        }
      }
    }
  }

  std::string name;
  Plan plan;
  Dependences dependences;
  Memory memory;
  std::map<std::string, Count> counts;
};

class Mutations : public testing::TestWithParam<const char *> {};

TEST_P(Mutations, AreCaught) { Corpus(GetParam()).run(); }

/// Under AddressSanitizer, where each takes ten times as long, the few plans
/// that have most kinds of instructions between them.
std::vector<const char *> corpora() {
  std::vector<const char *> names = {"llama-offload-microbatches-2",
                                     "llama-tensor-2", "llama-fused-2"};
  if (!kAddressSanitizer)
    names.insert(names.end(), {"llama-2", "llama-2-fsdp2", "llama-hsdp-4",
                               "llama-microbatches-2", "llama-activations-2",
                               "llama-offload-2"});
  return names;
}

INSTANTIATE_TEST_SUITE_P(Compiled, Mutations, testing::ValuesIn(corpora()),
                         [](const auto &info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

} // namespace
} // namespace fsdp::test
