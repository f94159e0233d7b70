//===- StageCheckpoints.cpp - copies of state beside the next step --------===//
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/Schedule.h"
#include "fsdp/Transforms/StepProgram.h"

#include "llvm/ADT/SetVector.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_STAGECHECKPOINTS
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;

namespace {
struct StageCheckpoints
    : mlir::fsdp::impl::StageCheckpointsBase<StageCheckpoints> {
  void runOnModule() override {
    ModuleOp module = getOperation();
    ProgramOp program = getProgram(module);
    if (!program)
      return signalPassFailure();
    auto steps = program.getOps<OptimizerStepOp>();
    if (steps.empty() || !getOrCreateSchedule(module).getStageCheckpoints())
      return;
    SymbolTable symbols(module);
    llvm::SetVector<StringAttr> units;
    for (auto name :
         (*steps.begin()).getParamNames().getAsRange<FlatSymbolRefAttr>())
      if (auto unit = symbols.lookup<ParamOp>(name.getAttr()).getUnitAttr())
        units.insert(unit.getAttr());

    Operation *backwardEnd = getBackwardEnd(program);
    MicrobatchesOp loop = getMicrobatches(program);
    llvm::DenseMap<StringAttr, Operation *> uses = getFirstUses(program);
    for (StringAttr unit : units) {
      Operation *use = uses.lookup(unit);
      PhaseOp backward = getBackward(program);
      Operation *at = use        ? use
                      : backward ? backward.getOperation()
                                 : backwardEnd;
      OpBuilder builder(at);
      auto stage = createFor<StageStateOp>(
          at, builder, FutureType::get(&getContext(), {}),
          FlatSymbolRefAttr::get(unit),
          loop ? Value(loop.getFirst()) : Value());
      setReason(stage, use ? "where forward first uses the unit"
                           : "forward does not use the unit");
      builder.setInsertionPoint(backwardEnd);
      createFor<WaitOp>(at, builder, TypeRange(), stage.getStaged());
    }
  }

private:
  /// By unit: what makes its parameters available in forward.
  static llvm::DenseMap<StringAttr, Operation *>
  getFirstUses(ProgramOp program) {
    llvm::DenseMap<StringAttr, Operation *> uses;
    for (Operation &op : getMicrobatchBody(program)) {
      if (auto phase = dyn_cast<PhaseOp>(op);
          phase && phase.getPhase() != Phase::Forward)
        break;
      if (op.getNumResults() > 0)
        if (AllGatherOp gather = getGather(op.getResult(0));
            gather && getResultsOp(gather) == &op)
          uses.try_emplace(gather.getUnitAttr().getAttr(), &op);
    }
    return uses;
  }
};
} // namespace
