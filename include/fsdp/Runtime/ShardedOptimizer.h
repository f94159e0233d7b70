//===- ShardedOptimizer.h - torch.optim's updates on parameter shards -----===//
#ifndef FSDP_RUNTIME_SHARDEDOPTIMIZER_H
#define FSDP_RUNTIME_SHARDEDOPTIMIZER_H

#include "fsdp/Plan/Plan.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp::runtime {

/// AdamW and SGD, bit-equal to torch.optim on the same shards: with `fused`
/// the fused ATen kernel, otherwise the operator sequence of
/// torch/optim/adam.py and sgd.py `_single_tensor_*`, the default on CPU.
class ShardedOptimizer {
public:
  /// `shards` are updated in place; empty ones are skipped. Throws InputError
  /// for settings torch.optim refuses.
  ShardedOptimizer(plan::Optimizer settings, std::vector<at::Tensor> shards);

  /// `grads` in the order of the shards, of the same shapes.
  void step(const std::vector<at::Tensor> &grads);

private:
  /// Parameters of one dtype, which one fused call takes together.
  struct Group {
    std::vector<size_t> members; ///< indices into the constructor's shards
    std::vector<at::Tensor> params;
    std::vector<at::Tensor> steps; ///< float32 scalars, AdamW only
    std::vector<at::Tensor> expAvgs;
    std::vector<at::Tensor> expAvgSqs;
    std::vector<at::Tensor> maxExpAvgSqs; ///< amsgrad only
    std::vector<at::Tensor> momenta;      ///< SGD with momentum only
  };

  void stepAdamW(Group &group, const std::vector<at::Tensor> &grads);
  void stepSGD(Group &group, const std::vector<at::Tensor> &grads);

  plan::Optimizer settings;
  std::vector<Group> groups;
  bool firstStep = true;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_SHARDEDOPTIMIZER_H
