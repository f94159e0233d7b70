//===- DataSource.h - the inputs of each step -----------------------------===//
#ifndef FSDP_RUNTIME_FILES_DATASOURCE_H
#define FSDP_RUNTIME_FILES_DATASOURCE_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Files/SafeTensors.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fsdp::runtime {

/// Checks a data set against a plan's inputs: the same names, dtypes and
/// shapes beyond dim 0, and at least one sample. Throws InputError.
void checkData(const plan::Plan &plan, const SafeTensors &data);

/// The inputs of one rank at one microbatch, in the plan's order. `step` counts
/// the microbatches of all steps from 0: a step with n of them takes n in a
/// row. With `data`: samples [(step*W + rank)*b, (step*W + rank + 1)*b), b the
/// plan's batch, each taken modulo the number of samples. Without:
/// integers uniform in [low, high) and standard normal floats, from a
/// generator seeded by seed, step and rank.
std::vector<at::Tensor> stepInputs(const plan::Plan &plan,
                                   const SafeTensors *data, uint64_t seed,
                                   int64_t step, int64_t rank);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_FILES_DATASOURCE_H
