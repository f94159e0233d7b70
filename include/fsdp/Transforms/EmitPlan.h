//===- EmitPlan.h - planned level to the executable plan ------------------===//
#ifndef FSDP_TRANSFORMS_EMITPLAN_H
#define FSDP_TRANSFORMS_EMITPLAN_H

#include "fsdp/Plan/Plan.h"
#include "mlir/IR/BuiltinOps.h"

namespace mlir::fsdp {

/// Translates a module at the planned level. Fails with an error at the op
/// that a plan cannot express (a dynamic shape, a whole parameter read, …).
/// `ops` gets the op behind each instruction of the training step.
FailureOr<::fsdp::plan::Plan>
emitPlan(ModuleOp module, llvm::SmallVectorImpl<Operation *> *ops = nullptr);

} // namespace mlir::fsdp

#endif // FSDP_TRANSFORMS_EMITPLAN_H
