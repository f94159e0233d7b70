//===- StepProgram.h - the training step's phases -------------------------===//
#ifndef FSDP_TRANSFORMS_STEPPROGRAM_H
#define FSDP_TRANSFORMS_STEPPROGRAM_H

#include "fsdp/Dialect/Aten.h"
#include "fsdp/Dialect/FSDP.h"

namespace mlir::fsdp {

/// What a microbatch of the step runs, forward and backward: the body of the
/// loop over the microbatches, or of a program without a loop.
Block &getMicrobatchBody(ProgramOp program);
template <typename OpT> auto getMicrobatchOps(ProgramOp program) {
  return getMicrobatchBody(program).getOps<OpT>();
}
/// The loss that a microbatch computes.
Value getLoss(ProgramOp program);

/// Where backward begins; null in a program without it.
PhaseOp getBackward(ProgramOp program);

/// What a pass creates an op for: another op, or a value.
class Origin {
public:
  Origin(Operation *op) : op(op), loc(op->getLoc()) {}
  Origin(OpState op) : Origin(op.getOperation()) {}
  Origin(Value value) : op(value.getDefiningOp()), loc(value.getLoc()) {}

  Operation *op; ///< null for an argument
  Location loc;
};

/// Creates an op at the location of `origin` and with its module, on which
/// units, checkpoints and messages depend; a call also gets its line. (A clone
/// has these attributes anyway.)
template <typename OpT, typename... Args>
OpT createFor(Origin origin, OpBuilder &builder, Args &&...args) {
  auto op = OpT::create(builder, origin.loc, std::forward<Args>(args)...);
  if (origin.op)
    copyOrigin(origin.op, op);
  return op;
}

/// The 1 of the loss's type with which backward begins: `aten::ones_like` of
/// the loss, or an `aten::full`. Null if it begins otherwise.
aten::CallOp findBackwardSeed(ProgramOp program);
/// The same; if it is null, with an error on the program that gives `reason`.
aten::CallOp getBackwardSeed(ProgramOp program, llvm::StringRef reason);

/// The program's `fsdp.gradients`; null if it has none.
GradientsOp getGradients(ProgramOp program);

/// What ends the program: its `fsdp.gradients`, or without one its
/// `fsdp.return`.
Operation *getStepEnd(ProgramOp program);
/// What ends backward: the loop's `fsdp.yield`; without a loop, the optimizer
/// phase; without that, the end of the step.
Operation *getBackwardEnd(ProgramOp program);

/// A builder at the program's end, in the optimizer phase; if that phase has
/// not begun yet, it begins there, at `loc`.
OpBuilder getOptimizerPhaseBuilder(ProgramOp program, Location loc);

} // namespace mlir::fsdp

#endif // FSDP_TRANSFORMS_STEPPROGRAM_H
