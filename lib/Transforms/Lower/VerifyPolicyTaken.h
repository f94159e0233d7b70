//===- VerifyPolicyTaken.h - no policy is lost in a plan ------------------===//
#ifndef FSDP_LIB_TRANSFORMS_LOWER_VERIFYPOLICYTAKEN_H
#define FSDP_LIB_TRANSFORMS_LOWER_VERIFYPOLICYTAKEN_H

#include "fsdp/Dialect/FSDP.h"

namespace mlir::fsdp {

/// Program-16: an error on the first policy op that no pass took up, as a plan
/// would lack what it asks for. `program` is the training step.
LogicalResult verifyPolicyTaken(ModuleOp module, ProgramOp program);

} // namespace mlir::fsdp

#endif // FSDP_LIB_TRANSFORMS_LOWER_VERIFYPOLICYTAKEN_H
