//===- StepProgram.cpp - the training step's phases -----------------------===//
#include "fsdp/Transforms/StepProgram.h"

using namespace mlir;
using namespace mlir::fsdp;

Block &mlir::fsdp::getMicrobatchBody(ProgramOp program) {
  if (MicrobatchesOp loop = getMicrobatches(program))
    return *loop.getBlock();
  return program.getBody().front();
}

Value mlir::fsdp::getLoss(ProgramOp program) {
  return getYielded(
      cast<ReturnOp>(program.getBody().front().getTerminator()).getLoss());
}

PhaseOp mlir::fsdp::getBackward(ProgramOp program) {
  for (auto phase : getMicrobatchOps<PhaseOp>(program))
    if (phase.getPhase() == Phase::Backward)
      return phase;
  return {};
}

aten::CallOp mlir::fsdp::findBackwardSeed(ProgramOp program) {
  Value loss = getLoss(program);
  bool backward = false;
  for (Operation &op : getMicrobatchBody(program)) {
    if (auto phase = dyn_cast<PhaseOp>(op))
      backward = phase.getPhase() == Phase::Backward;
    auto call = dyn_cast<aten::CallOp>(op);
    if (!backward || !call)
      continue;
    bool isLike = call.getCallee() == "aten::ones_like" &&
                  call.getOperands() == ValueRange(loss);
    bool isFilled =
        call.getCallee() == "aten::full" &&
        call.getResultTypes() == TypeRange(loss.getType()) &&
        call.getArgs()[1] == Builder(call.getContext()).getI64IntegerAttr(1);
    return isLike || isFilled ? call : aten::CallOp();
  }
  return {};
}

aten::CallOp mlir::fsdp::getBackwardSeed(ProgramOp program, StringRef reason) {
  aten::CallOp seed = findBackwardSeed(program);
  if (!seed)
    program.emitOpError("expected backward to begin with aten::ones_like of "
                        "the loss: ")
        << reason;
  return seed;
}

GradientsOp mlir::fsdp::getGradients(ProgramOp program) {
  Operation *terminator = program.getBody().front().getTerminator();
  return dyn_cast_or_null<GradientsOp>(terminator->getPrevNode());
}

Operation *mlir::fsdp::getStepEnd(ProgramOp program) {
  if (GradientsOp gradients = getGradients(program))
    return gradients;
  return program.getBody().front().getTerminator();
}

Operation *mlir::fsdp::getBackwardEnd(ProgramOp program) {
  if (MicrobatchesOp loop = getMicrobatches(program))
    return loop.getYield();
  for (auto phase : program.getOps<PhaseOp>())
    if (phase.getPhase() == Phase::Optimizer)
      return phase;
  return getStepEnd(program);
}

OpBuilder mlir::fsdp::getOptimizerPhaseBuilder(ProgramOp program,
                                               Location loc) {
  OpBuilder builder(getStepEnd(program));
  if (llvm::none_of(program.getOps<PhaseOp>(), [](PhaseOp phase) {
        return phase.getPhase() == Phase::Optimizer;
      }))
    PhaseOp::create(builder, loc, Phase::Optimizer);
  return builder;
}
