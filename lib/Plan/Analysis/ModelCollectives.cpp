//===- ModelCollectives.cpp - collectives that a model itself makes -------===//
#include "fsdp/Plan/ModelCollectives.h"

#include "fsdp/Plan/Operands.h"

#include <algorithm>
#include <array>
#include <utility>

namespace fsdp::plan {

namespace {

constexpr std::string_view kNamespace = "_c10d_functional::";

} // namespace

bool isModelCollective(std::string_view op) {
  return op.starts_with(kNamespace);
}

std::optional<CollectiveKind> modelCollectiveKind(std::string_view op) {
  using Kind = CollectiveKind;
  constexpr std::array<std::pair<std::string_view, Kind>, 11> kinds = {{
      {"all_gather_into_tensor", Kind::AllGather},
      {"all_gather_into_tensor_coalesced", Kind::AllGather},
      {"reduce_scatter_tensor", Kind::ReduceScatter},
      {"reduce_scatter_tensor_coalesced", Kind::ReduceScatter},
      {"all_reduce", Kind::AllReduce},
      {"all_reduce_coalesced", Kind::AllReduce},
      {"all_to_all_single", Kind::AllToAll},
      {"broadcast", Kind::SendReceive},
      {"batch_p2p_ops", Kind::SendReceive},
      {"isend", Kind::SendReceive},
      {"irecv", Kind::SendReceive},
  }};
  if (!isModelCollective(op))
    return std::nullopt;
  op.remove_prefix(kNamespace.size());
  for (const auto &[name, kind] : kinds)
    if (op == name)
      return kind;
  return std::nullopt;
}

std::string axisOf(const Call &call) {
  for (auto arg = call.args.rbegin(); arg != call.args.rend(); ++arg)
    if (const auto *text = std::get_if<std::string>(&arg->value))
      return *text;
  return "";
}

std::optional<ModelCollective> modelCollective(const Plan &plan,
                                               const Call &call) {
  if (!isModelCollective(call.op))
    return std::nullopt;
  ModelCollective result;
  result.kind = modelCollectiveKind(call.op);
  result.axis = axisOf(call);
  if (!result.kind && result.axis.empty())
    return std::nullopt;
  for (const Arg &arg : call.args)
    if (const auto *number = std::get_if<int64_t>(&arg.value);
        number && result.kind != CollectiveKind::SendReceive)
      result.ranks = *number;
  for (ValueId in : getOperands(call))
    result.ins.push_back(plan.values[size_t(in)].shape);
  for (ValueId out : call.outs)
    result.outs.push_back(out == -1
                              ? std::nullopt
                              : std::optional(plan.values[size_t(out)].shape));
  return result;
}

const ModelAxis *findAxis(const std::optional<ModelParallel> &parallel,
                          const std::string &name) {
  if (parallel)
    for (const ModelAxis &axis : parallel->axes)
      if (axis.name == name)
        return &axis;
  return nullptr;
}

int64_t passedBytes(const Plan &plan, const Call &call) {
  int64_t given = 0, got = 0;
  for (ValueId in : getOperands(call))
    given += plan.values[size_t(in)].numBytes();
  for (ValueId out : call.outs)
    if (out != -1)
      got += plan.values[size_t(out)].numBytes();
  bool gathers = modelCollectiveKind(call.op) == CollectiveKind::AllGather;
  return gathers ? std::max(given, got) : given;
}

} // namespace fsdp::plan
