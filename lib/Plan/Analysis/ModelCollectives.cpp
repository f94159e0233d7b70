//===- ModelCollectives.cpp - collectives that a model itself makes -------===//
#include "fsdp/Plan/ModelCollectives.h"

#include "fsdp/Plan/Limits.h"
#include "fsdp/Plan/Operands.h"

#include <algorithm>
#include <array>
#include <set>
#include <utility>

namespace fsdp::plan {

namespace {

constexpr std::string_view kNamespace = "_c10d_functional::";

std::string shapeText(const std::vector<int64_t> &shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i)
    text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

/// The shape of a result. All but the first dimension are the operand's; an
/// all-to-all has any number of rows.
std::optional<std::vector<int64_t>>
resultShape(CollectiveKind kind, std::vector<int64_t> shape, int64_t ranks) {
  using Kind = CollectiveKind;
  if (kind == Kind::AllReduce || kind == Kind::SendReceive)
    return shape;
  if (kind == Kind::AllToAll)
    return std::nullopt;
  // PyTorch takes a scalar as a vector of one.
  if (shape.empty())
    shape = {1};
  if (kind == Kind::AllGather
          ? __builtin_mul_overflow(shape[0], ranks, &shape[0])
          : shape[0] % ranks != 0)
    shape[0] = -1; // no such result
  else if (kind == Kind::ReduceScatter)
    shape[0] /= ranks;
  return shape;
}

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

std::optional<ModelCollective> modelCollective(const Plan &plan,
                                               const Call &call) {
  std::optional<CollectiveKind> kind = modelCollectiveKind(call.op);
  if (!kind)
    return std::nullopt;
  ModelCollective result;
  result.kind = *kind;
  for (const Arg &arg : call.args) {
    if (const auto *text = std::get_if<std::string>(&arg.value))
      result.axis = *text;
    else if (const auto *number = std::get_if<int64_t>(&arg.value);
             number && *kind != CollectiveKind::SendReceive)
      result.ranks = *number;
  }
  for (ValueId in : getOperands(call))
    result.ins.push_back(plan.values[size_t(in)].shape);
  for (ValueId out : call.outs)
    result.outs.push_back(out == -1
                              ? std::nullopt
                              : std::optional(plan.values[size_t(out)].shape));
  return result;
}

static const ModelAxis *findAxis(const std::optional<ModelParallel> &parallel,
                                 const std::string &name) {
  if (parallel)
    for (const ModelAxis &axis : parallel->axes)
      if (axis.name == name)
        return &axis;
  return nullptr;
}

const ModelAxis *findAxis(const Plan &plan, const ModelCollective &collective) {
  return findAxis(plan.modelParallel, collective.axis);
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

std::string findDefect(const ModelCollective &collective,
                       const std::optional<ModelParallel> &parallel) {
  const ModelAxis *axis = findAxis(parallel, collective.axis);
  if (!axis) {
    std::string known;
    if (parallel)
      for (const ModelAxis &each : parallel->axes)
        known += (known.empty() ? "" : ", ") + ("\"" + each.name + "\"");
    return "expected an axis of the model's mesh (" +
           (known.empty() ? "it has none" : known) + "), got \"" +
           collective.axis + "\"";
  }
  if (collective.ranks && *collective.ranks != axis->ranks)
    return "expected the " + std::to_string(axis->ranks) +
           " ranks of the axis \"" + axis->name + "\", got " +
           std::to_string(*collective.ranks);
  if (collective.ins.size() != collective.outs.size())
    return "expected a result for each of " +
           std::to_string(collective.ins.size()) + " operands, got " +
           std::to_string(collective.outs.size());
  for (size_t i = 0; i < collective.ins.size(); ++i) {
    auto want = resultShape(collective.kind, collective.ins[i], axis->ranks);
    if (!want || !collective.outs[i] || collective.outs[i] == want)
      continue;
    if (std::count(want->begin(), want->end(), -1))
      return "expected rows that the " + std::to_string(axis->ranks) +
             " ranks of the axis \"" + axis->name +
             "\" can share evenly, got the operand " +
             shapeText(collective.ins[i]);
    return "expected over the " + std::to_string(axis->ranks) +
           " ranks of the axis \"" + axis->name + "\" the result " +
           shapeText(*want) + ", got " + shapeText(*collective.outs[i]);
  }
  return "";
}

std::string findDefect(const ModelParallel &parallel) {
  auto within = [](int64_t value) {
    return value >= 1 && value <= kMaxWorldSize;
  };
  if (!within(parallel.ranks) || !within(parallel.dataStride))
    return "expected ranks and data_stride in [1, " +
           std::to_string(kMaxWorldSize) + "], got " +
           std::to_string(parallel.ranks) + " and " +
           std::to_string(parallel.dataStride);
  std::set<std::string> names;
  for (const ModelAxis &axis : parallel.axes) {
    if (axis.name.empty() || !names.insert(axis.name).second)
      return "expected axes with names of their own, got \"" + axis.name + "\"";
    if (!within(axis.ranks) || !within(axis.stride))
      return "expected ranks and stride of the axis \"" + axis.name +
             "\" in [1, " + std::to_string(kMaxWorldSize) + "], got " +
             std::to_string(axis.ranks) + " and " + std::to_string(axis.stride);
  }
  return "";
}

} // namespace fsdp::plan
