//===- StepProgram.h - the training step's phases -------------------------===//
#ifndef FSDP_TRANSFORMS_STEPPROGRAM_H
#define FSDP_TRANSFORMS_STEPPROGRAM_H

#include "fsdp/Dialect/Aten.h"
#include "fsdp/Dialect/FSDP.h"

namespace mlir::fsdp {

/// Where backward begins; null in a program without it.
PhaseOp getBackward(ProgramOp program);

/// The qualified name of the module whose forward, or the backward of it, made
/// the op; empty if it is of none.
llvm::StringRef getModuleName(Operation *op);

/// The `aten::ones_like` of the loss with which backward begins; null, with an
/// error on the program that gives `reason`, where it begins otherwise.
aten::CallOp getBackwardSeed(ProgramOp program, llvm::StringRef reason);

/// The program's `fsdp.gradients`; null where it has none.
GradientsOp getGradients(ProgramOp program);

/// What ends the program: its `fsdp.gradients`, without one its `fsdp.return`.
Operation *getStepEnd(ProgramOp program);

/// A builder at the program's end, in the optimizer phase, which begins there
/// at `loc` unless it has begun.
OpBuilder getOptimizerPhaseBuilder(ProgramOp program, Location loc);

} // namespace mlir::fsdp

#endif // FSDP_TRANSFORMS_STEPPROGRAM_H
