//===- DeferReshards.cpp - keep parameters for the next microbatch --------===//
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/StepProgram.h"

#include "llvm/ADT/SetVector.h"

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
    for (auto policy :
         llvm::make_early_inc_range(module.getOps<AccumulationOp>())) {
      ProgramOp program = getProgram(module);
      if (!program)
        return signalPassFailure();
      MicrobatchesOp loop = getMicrobatches(program);
      if (!loop && policy.getSteps() > 1) {
        policy.emitOpError("Program-16: expected a loop over microbatches: run "
                           "fsdp-insert-accumulation first");
        return signalPassFailure();
      }
      if (loop && !policy.getReshardAfterBackward())
        defer(loop);
      policy.erase();
    }
  }

private:
  struct Unit {
    AllGatherOp firstGather, lastGather;
    ReshardOp lastReshard; ///< in backward
  };

  static void defer(MicrobatchesOp loop) {
    llvm::DenseMap<StringAttr, Unit> units;
    llvm::SetVector<StringAttr> reshards; ///< units that backward reshards
    bool inBackward = false;
    for (Operation &op : *loop.getBlock()) {
      if (auto phase = dyn_cast<PhaseOp>(op))
        inBackward = phase.getPhase() == Phase::Backward;
      if (auto gather = dyn_cast<AllGatherOp>(op)) {
        Unit &unit = units[gather.getUnitAttr().getAttr()];
        if (!unit.firstGather)
          unit.firstGather = gather;
        unit.lastGather = gather;
      } else if (auto reshard = dyn_cast<ReshardOp>(op);
                 reshard && inBackward) {
        units[reshard.getUnitAttr().getAttr()].lastReshard = reshard;
        reshards.insert(reshard.getUnitAttr().getAttr());
      }
    }
    Operation *end = findEnd(loop);
    for (StringAttr name : reshards)
      keep(loop, units.lookup(name), end);
  }

  /// What computes and reduces gradients is over here; what adds and copies
  /// them together at the end of backward comes later.
  static Operation *findEnd(MicrobatchesOp loop) {
    Operation *end = loop.getYield();
    while (isa_and_nonnull<AccumulateOp, CopyToHostOp, AllReduceOp>(
        end->getPrevNode()))
      end = end->getPrevNode();
    while (isa<AllReduceOp>(end))
      end = end->getNextNode();
    return end;
  }

  /// Keeps what the unit's last gather has gathered for the next microbatch,
  /// until before `end` of the last one.
  static void keep(MicrobatchesOp loop, Unit unit, Operation *end) {
    unit.lastReshard->moveBefore(end);
    unit.lastReshard.getConditionMutable().assign(loop.getLast());
    setReason(unit.lastReshard, "at the end of the last microbatch: the next "
                                "one uses what this one gathered");
    SmallVector<Value> kept;
    for (Value param : unit.lastGather.getParams())
      kept.push_back(loop.carry(param));
    AllGatherOp first = unit.firstGather;
    first.getConditionMutable().assign(loop.getFirst());
    first.getKeptMutable().assign(kept);
    if (auto copy = first.getShards().front().getDefiningOp<CopyToDeviceOp>())
      copy.getConditionMutable().assign(loop.getFirst());
  }
};
} // namespace
