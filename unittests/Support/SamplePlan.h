//===- SamplePlan.h - a small complete training step, by hand -------------===//
#ifndef FSDP_UNITTESTS_SUPPORT_SAMPLEPLAN_H
#define FSDP_UNITTESTS_SUPPORT_SAMPLEPLAN_H

#include "fsdp/Plan/Plan.h"

namespace fsdp::test {

inline constexpr int64_t kBatch = 4;
inline constexpr int64_t kFeatures = 3;
inline constexpr int64_t kOutputs = 5;

/// Two-layer linear regression, loss = mean((x W1' + s + b - y)^2) with
/// W1' = W1 W2: parameters "layer.w1" [3, 7] in unit "layer", "w2" [7, 5] and
/// "b" [5] in the root unit, a frozen "scale" [1] in the root unit and a
/// buffer "shift" [5]; inputs x [4, 3] and y [4, 5], float32. Gradients
/// written out by hand; unit "layer" is resharded after forward.
///
/// With `transposedGrad` the gradient of w2 is a transposed view of the result
/// that is written in the reduce-scatter input's place.
/// With `replicas`, a divisor of the world size, gradients are all-reduced.
plan::Plan samplePlan(int64_t worldSize, bool transposedGrad = false,
                      int64_t replicas = 1);

/// Adds an initialisation and takes the weights file away. In the order of
/// draws: every parameter is normal_(0, 1), then the buffer "shift" is twice
/// the constant 1, 2, 3, 4, 5. A parameter takes three instructions (empty,
/// normal_, write_param), the buffer the last three (constant, mul,
/// write_buffer).
void addInit(plan::Plan &plan);

/// Adds an evaluation: the forward of the step, with a reshard of every unit.
void addEvaluation(plan::Plan &plan);

/// Puts unit "layer" on the host: copies before its gathers and of its
/// gradient. Call it before addEvaluation.
void offload(plan::Plan &plan);

/// Puts what backward uses of forward, h = x W1 and d (the difference from y),
/// on the host in between: two storages, of [4, 7] and [4, 5]. Call it after
/// the frees are there, if there are to be any, and before layOutArena.
void offloadActivations(plan::Plan &plan);

/// Puts collectives and copies of activations beside the compute stream: each
/// begins where it stands, and a wait for it follows at once. Gives the values
/// that are views the storages that they share.
void beginCollectives(plan::Plan &plan);

/// Adds the results of the reduce-scatters over two microbatches a step: every
/// all-reduce takes the sums, in the last one. For plans with all-reduces.
void accumulatePartial(plan::Plan &plan);

/// Adds whole gradients over two microbatches a step, in float64; the
/// reduce-scatters take the sums, in the last one.
void accumulateWhole(plan::Plan &plan);

/// Copies both units' state for a checkpoint beside forward, and awaits the
/// copies where backward ends.
void stageState(plan::Plan &plan);

/// Position of the first instruction of a kind.
template <typename Kind> size_t find(const plan::Plan &plan, int skip = 0) {
  for (size_t i = 0; i < plan.instructions.size(); ++i)
    if (std::holds_alternative<Kind>(plan.instructions[i].kind) && skip-- == 0)
      return i;
  throw std::logic_error("no such instruction");
}

} // namespace fsdp::test

#endif // FSDP_UNITTESTS_SUPPORT_SAMPLEPLAN_H
