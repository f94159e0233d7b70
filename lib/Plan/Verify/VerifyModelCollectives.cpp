//===- VerifyModelCollectives.cpp - what the model's collectives are over -===//
#include "Verifier.h"
#include "fsdp/Plan/Limits.h"
#include "fsdp/Plan/ModelCollectives.h"

#include <algorithm>
#include <set>

namespace fsdp::plan {

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

std::string findDefect(const ModelCollective &collective,
                       const std::optional<ModelParallel> &parallel) {
  if (!collective.kind)
    return "expected a collective that is known, got another over the axis " +
           quote(collective.axis);
  const ModelAxis *axis = findAxis(parallel, collective.axis);
  if (!axis) {
    std::string known;
    if (parallel)
      for (const ModelAxis &each : parallel->axes)
        known += (known.empty() ? "" : ", ") + quote(each.name);
    return "expected an axis of the model's mesh (" +
           (known.empty() ? "it has none" : known) + "), got " +
           quote(collective.axis);
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
    auto want = resultShape(*collective.kind, collective.ins[i], axis->ranks);
    if (!want || !collective.outs[i] || collective.outs[i] == want)
      continue;
    if (std::count(want->begin(), want->end(), -1))
      return "expected rows that the " + std::to_string(axis->ranks) +
             " ranks of the axis \"" + axis->name +
             "\" can share evenly, got the operand " +
             describe(collective.ins[i]);
    return "expected over the " + std::to_string(axis->ranks) +
           " ranks of the axis \"" + axis->name + "\" the result " +
           describe(*want) + ", got " + describe(*collective.outs[i]);
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
