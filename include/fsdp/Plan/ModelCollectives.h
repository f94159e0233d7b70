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

/// Whether the operator is one of PyTorch's functional collectives,
/// "_c10d_functional::all_reduce" for example. What it returns may be
/// incomplete.
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
  /// nullopt for an operator that is not known: findDefect refuses it.
  std::optional<CollectiveKind> kind;
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

/// The axis that a call names, by the last text among its arguments; empty if
/// it names none.
std::string axisOf(const Call &call);

/// A call of a plan that isModelCollective and names an axis, as those between
/// ranks do, or whose operator is known; nullopt for any other.
std::optional<ModelCollective> modelCollective(const Plan &plan,
                                               const Call &call);

/// Null if there is none of that name.
const ModelAxis *findAxis(const std::optional<ModelParallel> &parallel,
                          const std::string &name);

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
