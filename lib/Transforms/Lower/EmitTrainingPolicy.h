//===- EmitTrainingPolicy.h - the policy about the update in a plan -------===//
#ifndef FSDP_LIB_TRANSFORMS_LOWER_EMITTRAININGPOLICY_H
#define FSDP_LIB_TRANSFORMS_LOWER_EMITTRAININGPOLICY_H

#include "fsdp/Dialect/FSDP.h"
#include "fsdp/Plan/Plan.h"

namespace mlir::fsdp {

/// Optimizer, parameter groups, learning rates, gradient scaler: from the
/// module's policy ops into `result`.
void emitTrainingPolicy(ModuleOp module, ::fsdp::plan::Plan &result);

} // namespace mlir::fsdp

#endif // FSDP_LIB_TRANSFORMS_LOWER_EMITTRAININGPOLICY_H
