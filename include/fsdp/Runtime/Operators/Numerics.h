//===- Numerics.h - PyTorch's settings that decide bits -------------------===//
#ifndef FSDP_RUNTIME_OPERATORS_NUMERICS_H
#define FSDP_RUNTIME_OPERATORS_NUMERICS_H

#include "fsdp/Plan/Plan.h"

namespace fsdp::runtime {

/// Gives PyTorch's global settings the values that they had when the plan's
/// program was captured, in this process. A process that a user's Python owns
/// does not need this: it has the settings of its user.
void applyNumerics(const plan::Plan &plan);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_OPERATORS_NUMERICS_H
