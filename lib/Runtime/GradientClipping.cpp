//===- GradientClipping.cpp - clip_grad_norm_ on gradient shards ----------===//
#include "fsdp/Runtime/GradientClipping.h"

#include <ATen/ops/clamp.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <cmath>

namespace fsdp::runtime {

ClippedGrads clipGradNorm(Comm &comm, std::vector<at::Tensor> shards,
                          double maxNorm, double normType, bool inPlace) {
  if (shards.empty())
    return {at::zeros({}), {}};
  std::vector<at::Tensor> norms;
  for (const at::Tensor &shard : shards)
    norms.push_back(shard.numel() == 0
                        ? at::zeros({}, shard.options())
                        : at::linalg_vector_norm(shard, normType));
  at::Tensor vector = at::stack(norms);
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
  for (at::Tensor &shard : shards)
    result.grads.push_back(inPlace ? shard.mul_(factor) : shard.mul(factor));
  return result;
}

} // namespace fsdp::runtime
