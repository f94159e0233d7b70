//===- Initialise.h - the model's own initialisation ----------------------===//
#ifndef FSDP_RUNTIME_EXECUTION_INITIALISE_H
#define FSDP_RUNTIME_EXECUTION_INITIALISE_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Collectives/Comm.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fsdp::runtime {

/// Runs Plan::init at `seed` of the default generator: writes this rank's rows
/// of each parameter into its shard, and the buffers, which are in the plan's
/// order. Every rank draws every value whole, one at a time, so that all world
/// sizes get the bits of a single device. Throws InputError for a plan that
/// this LibTorch cannot run, RunError for an operator that fails.
void initialise(const plan::Plan &plan, Comm &comm,
                const std::vector<at::Tensor> &buffers, uint64_t seed);

/// Writes this rank's rows of `whole`, which has the parameter's shape, into
/// its shard; all of an ignored parameter.
void writeParam(const plan::Plan &plan, Comm &comm, int32_t param,
                const at::Tensor &whole);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_EXECUTION_INITIALISE_H
