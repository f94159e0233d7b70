//===- ModelCollectives.h - collectives that a model itself makes ---------===//
//
// A model that is parallelised before FSDP communicates over axes of the mesh
// that are not FSDP's: calls of PyTorch's functional collectives, whose last
// argument names the axis (Plan::modelParallel). They are described here
// without IR and without a plan, so that the dialect and the plan check the
// same.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_PLAN_MODELCOLLECTIVES_H
#define FSDP_PLAN_MODELCOLLECTIVES_H

#include "fsdp/Plan/Plan.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::plan {

/// Whether the operator, "_c10d_functional::all_reduce" for example, is one.
bool isModelCollective(std::string_view op);

enum class CollectiveKind : uint8_t {
  AllGather,
  ReduceScatter,
  AllReduce,
  AllToAll,
  /// From one rank to another, or to all.
  SendReceive,
};

/// One call.
struct ModelCollective {
  CollectiveKind kind = CollectiveKind::AllReduce;
  std::string axis; ///< empty if the call names none
  /// The number of ranks that the call says.
  std::optional<int64_t> ranks;
  /// Shapes of its operands, and of as many results; nullopt for a result that
  /// is not used.
  std::vector<std::vector<int64_t>> ins;
  std::vector<std::optional<std::vector<int64_t>>> outs;
};

/// nullopt for an operator that is not known.
std::optional<CollectiveKind> modelCollectiveKind(std::string_view op);

/// A call of a plan that isModelCollective. nullopt if its operator is not
/// known.
std::optional<ModelCollective> modelCollective(const Plan &plan,
                                               const Call &call);

/// The axis that it is over; null if the plan has none of that name.
const ModelAxis *findAxis(const Plan &plan, const ModelCollective &collective);

/// The bytes that such a call passes around: all that is gathered, or the
/// operands.
int64_t passedBytes(const Plan &plan, const Call &call);

/// What keeps the call from being one over an axis of `parallel`: it names
/// none, says another number of ranks, or has results of shapes that such a
/// collective does not give. Empty if nothing does.
std::string findDefect(const ModelCollective &collective,
                       const std::optional<ModelParallel> &parallel);
/// What the axes contradict in themselves. Empty if nothing.
std::string findDefect(const ModelParallel &parallel);

} // namespace fsdp::plan

#endif // FSDP_PLAN_MODELCOLLECTIVES_H
