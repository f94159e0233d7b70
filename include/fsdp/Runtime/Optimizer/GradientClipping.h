//===- GradientClipping.h - clip_grad_norm_ on gradient shards ------------===//
#ifndef FSDP_RUNTIME_OPTIMIZER_GRADIENTCLIPPING_H
#define FSDP_RUNTIME_OPTIMIZER_GRADIENTCLIPPING_H

#include "fsdp/Runtime/Collectives/Comm.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp::runtime {

/// The total norm of gradients, and the gradients times
/// min(maxNorm / (norm + 1e-6), 1).
struct ClippedGrads {
  at::Tensor norm; ///< a scalar beside the first shard, equal on all ranks
  std::vector<at::Tensor> grads;
};

/// torch.nn.utils.clip_grad_norm_ on DTensors, bit by bit (torch's
/// nn/utils/clip_grad.py, and _NormPartial of
/// distributed/tensor/_ops/_math_ops.py): the norm of each shard, to the power
/// normType, one all-reduce of the vector of these, its root, the norm of the
/// vector. With infinity the all-reduce is a maximum; an empty shard counts 0
/// (FSDP2 fails there). `shards` are this rank's, in the order of
/// model.parameters(), complete, on the device or, for offloaded units, on the
/// host; with `inPlace` the result is written to them. `normType` is 1, 2 or
/// infinity. A collective operation.
ClippedGrads clipGradNorm(Comm &comm, std::vector<at::Tensor> shards,
                          double maxNorm, double normType,
                          bool inPlace = false);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_OPTIMIZER_GRADIENTCLIPPING_H
