//===- StepGradients.h - gradients on their way to the update -------------===//
#ifndef FSDP_TRANSFORMS_STEPGRADIENTS_H
#define FSDP_TRANSFORMS_STEPGRADIENTS_H

#include "fsdp/Dialect/FSDP.h"

namespace mlir::fsdp {

/// Some of the gradients that a program's `fsdp.gradients` takes: the one way
/// in which passes put an op between a gradient and its use. Valid as long as
/// that op is.
class StepGradients {
public:
  /// The gradients of those of `params` for which `selects` holds, in that
  /// order; none if the program has no `fsdp.gradients`.
  StepGradients(ProgramOp program, ArrayRef<ParamOp> params,
                llvm::function_ref<bool(ParamOp, Value)> selects);
  /// The same for all parameters, in the order of the module.
  StepGradients(ProgramOp program,
                llvm::function_ref<bool(ParamOp, Value)> selects);

  bool empty() const { return operands.empty(); }
  ArrayRef<ParamOp> getParams() const { return params; }
  /// The names for an op's `param_names`; there is at least one.
  ArrayAttr getNames() const;
  SmallVector<Value> getValues();
  SmallVector<Type> getTypes();
  /// The one that is computed last; there is at least one.
  Value getLast();
  /// Builds after the op that computes the last one, in backward.
  OpBuilder getBuilder();
  /// Makes `values` the gradients: as many, in the same order.
  void replaceWith(ValueRange values);

private:
  GradientsOp op;
  SmallVector<ParamOp> params;
  SmallVector<unsigned> operands; ///< of `op`, by parameter
};

/// Selects gradients that are this rank's part.
bool isShard(ParamOp param, Value grad);

} // namespace mlir::fsdp

#endif // FSDP_TRANSFORMS_STEPGRADIENTS_H
