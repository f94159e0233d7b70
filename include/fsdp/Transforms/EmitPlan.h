//===- EmitPlan.h - planned level to the executable plan ------------------===//
#ifndef FSDP_TRANSFORMS_EMITPLAN_H
#define FSDP_TRANSFORMS_EMITPLAN_H

#include "fsdp/Plan/Plan.h"
#include "mlir/IR/BuiltinOps.h"

namespace mlir::fsdp {

/// What parts of a plan come from.
struct PlanOrigins {
  /// The ops behind the instructions of the step and of the evaluation.
  SmallVector<Operation *> step, evaluation;
  /// By id: the values.
  SmallVector<Value> values;
};

/// Serialises a module at the planned level: the plan contains what the module
/// contains. From the scheduled level on, a module has a plan too, except for
/// what later passes add. Fails with an error at an op that a plan cannot
/// express (a dynamic shape, a whole parameter read, …).
FailureOr<::fsdp::plan::Plan> emitPlan(ModuleOp module,
                                       PlanOrigins *origins = nullptr);

} // namespace mlir::fsdp

#endif // FSDP_TRANSFORMS_EMITPLAN_H
