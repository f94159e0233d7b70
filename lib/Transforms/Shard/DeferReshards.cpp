//===- DeferReshards.cpp - keep parameters for the next microbatch --------===//
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/StepProgram.h"

#include "llvm/ADT/MapVector.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_DEFERRESHARDS
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;

namespace {
struct DeferReshards : mlir::fsdp::impl::DeferReshardsBase<DeferReshards> {
  void runOnModule() override {
    ModuleOp module = getOperation();
    if (llvm::none_of(module.getOps<AccumulationOp>(), [](AccumulationOp op) {
          return op.getSteps() > 1 && !op.getReshardAfterBackward();
        }))
      return;
    ProgramOp program = getProgram(module);
    if (!program)
      return signalPassFailure();

    Operation *backwardEnd = nullptr, *stepEnd = getStepEnd(program);
    bool inBackward = false;
    llvm::MapVector<StringAttr, AllGatherOp> firstGathers;
    llvm::MapVector<StringAttr, ReshardOp> lastReshards; // in backward
    for (Operation &op : program.getBody().front()) {
      if (&op == stepEnd)
        break;
      if (auto phase = dyn_cast<PhaseOp>(op))
        inBackward = phase.getPhase() == Phase::Backward;
      if (inBackward)
        backwardEnd = &op;
      if (auto gather = dyn_cast<AllGatherOp>(op))
        firstGathers.try_emplace(gather.getUnitAttr().getAttr(), gather);
      else if (auto reshard = dyn_cast<ReshardOp>(op); reshard && inBackward)
        lastReshards[reshard.getUnitAttr().getAttr()] = reshard;
    }
    if (!backwardEnd)
      return;
    for (auto [unit, reshard] : lastReshards) {
      if (reshard != backwardEnd) {
        reshard->moveAfter(backwardEnd);
        backwardEnd = reshard;
      }
      reshard.setLastMicrobatch(true);
      setReason(reshard, "at the end of the last microbatch: the next one uses "
                         "what this one gathered");
      firstGathers[unit].setFirstMicrobatch(true);
    }
  }
};
} // namespace
