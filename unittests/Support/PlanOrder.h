//===- PlanOrder.h - what a plan's streams and events order ---------------===//
//
// An oracle for verifyPlan: the transitive closure of stream order and events,
// pair by pair. It shares no code with the verifier.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_UNITTESTS_SUPPORT_PLANORDER_H
#define FSDP_UNITTESTS_SUPPORT_PLANORDER_H

#include "fsdp/Plan/Plan.h"

#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace fsdp::test {

/// A mutant, and for each of its instructions the original's position; -1 for
/// one that it has besides.
struct Mutant {
  plan::Plan plan;
  std::vector<int> origin;
};

using Relation = std::vector<std::vector<bool>>;

/// [y][x]: x is complete before y begins. nullopt if an instruction waits for
/// what no earlier one records.
std::optional<Relation> orderOf(const std::vector<plan::Instruction> &list);

/// Pairs of a step's instructions that touch one thing, of which one writes it.
class Dependences {
public:
  /// Borrows the plan.
  explicit Dependences(const plan::Plan &plan);

  /// Whether a mutant orders all pairs of which it has both as the plan does.
  bool holdIn(const Mutant &mutant) const;

private:
  struct Access {
    size_t at;
    bool writes;
  };
  enum class Kind { Storage, Gathered, Shards };

  void touch(Kind kind, int32_t index, bool writes);
  plan::ValueId ownerOf(plan::ValueId value) const;
  void visit(const plan::Instruction &instruction);
  /// What lay in a storage's bytes before must be over when it is made.
  void addPlaces();

  const plan::Plan &plan;
  /// Of the unrolled list: the position in the plan.
  std::vector<size_t> position;
  size_t now = 0;
  std::map<std::pair<Kind, int32_t>, std::vector<Access>> touched;
  std::map<plan::ValueId, int> alive;
  /// What the host holds of activations.
  std::set<plan::ValueId> onHost;
  std::set<std::pair<size_t, size_t>> pairs;
};

} // namespace fsdp::test

#endif // FSDP_UNITTESTS_SUPPORT_PLANORDER_H
