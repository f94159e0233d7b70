//===- GradientClipping.cpp - clip_grad_norm_ on gradient shards ----------===//
#include "fsdp/Runtime/Optimizer/GradientClipping.h"

#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <map>

namespace fsdp::runtime {

namespace {

/// The norm of each shard, on the device of the first, in the order in which
/// clip_grad_norm_ has them: those of one device and dtype together, the group
/// that appears first at the end.
at::Tensor normsOf(const std::vector<at::Tensor> &shards, double normType) {
  std::vector<std::vector<at::Tensor>> groups;
  for (const at::Tensor &shard : shards) {
    auto found = std::find_if(groups.begin(), groups.end(), [&](auto &group) {
      return group[0].options().type_equal(shard.options());
    });
    if (found == groups.end())
      groups.insert(groups.begin(), std::vector{shard});
    else
      found->push_back(shard);
  }
  std::vector<at::Tensor> norms;
  for (const std::vector<at::Tensor> &group : groups) {
    std::vector<at::Tensor> filled, own;
    for (const at::Tensor &shard : group)
      if (shard.numel() > 0)
        filled.push_back(shard);
    if (!filled.empty())
      filled = at::_foreach_norm(filled, normType);
    auto next = filled.begin();
    for (const at::Tensor &shard : group)
      own.push_back(
          shard.numel() > 0
              ? *next++
              : at::zeros({}, shard.options().dtype(
                                  c10::toRealValueType(shard.scalar_type()))));
    norms.push_back(at::stack(own).to(shards[0].device()));
  }
  return norms.size() == 1 ? norms[0] : at::cat(norms);
}

} // namespace

ClippedGrads clipGradNorm(Comm &comm, std::vector<at::Tensor> shards,
                          double maxNorm, double normType, bool inPlace) {
  if (shards.empty())
    return {at::zeros({}), {}};
  at::Tensor vector = normsOf(shards, normType);
  if (std::isinf(normType)) {
    comm.allReduce(vector, Reduction::Max);
  } else {
    vector = at::pow(vector, normType);
    comm.allReduce(vector, Reduction::Sum);
    vector = at::pow(vector, 1.0 / normType);
  }
  ClippedGrads result{at::linalg_vector_norm(vector, normType), {}};
  // Python's `number / tensor` is reciprocal and multiplication.
  at::Tensor factor = result.norm.add(1e-6).reciprocal().mul(maxNorm);
  factor = at::clamp(factor, std::nullopt, 1.0);
  std::map<c10::DeviceType, at::Tensor> factors;
  for (at::Tensor &shard : shards) {
    at::Tensor &here = factors[shard.device().type()];
    if (!here.defined())
      here = factor.to(shard.device());
    result.grads.push_back(inPlace ? shard.mul_(here) : shard.mul(here));
  }
  return result;
}

} // namespace fsdp::runtime
