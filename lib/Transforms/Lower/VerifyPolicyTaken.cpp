//===- VerifyPolicyTaken.cpp - no policy is lost in a plan ----------------===//
#include "VerifyPolicyTaken.h"

#include "fsdp/Transforms/StepProgram.h"

using namespace mlir;
using namespace mlir::fsdp;

static LogicalResult failPolicy(Operation *policy) {
  return policy->emitOpError("Program-16: expected a pass to have applied it "
                             "before a plan is emitted, found none");
}

LogicalResult mlir::fsdp::verifyPolicyTaken(ModuleOp module,
                                            ProgramOp program) {
  // Those that their passes erase.
  for (Operation &op : module.getBody()->getOperations())
    if (isa<AutoUnitsOp, UnitPatternOp, ShardPlacementOp, IgnoreOp,
            CheckpointPatternOp, OffloadPatternOp, GradientClippingOp,
            AccumulationOp, ChunkedLossOp>(op))
      return failPolicy(&op);
  // Those that the plan has too: the step does what they say.
  if (program.getOps<OptimizerStepOp>().empty())
    return success();
  for (auto policy : module.getOps<GradScalerOp>())
    if (program.getOps<UnscaleOp>().empty())
      return failPolicy(policy);
  for (auto gather : getMicrobatchOps<AllGatherOp>(program)) {
    auto unit = module.lookupSymbol<UnitOp>(gather.getUnitAttr());
    if (unit.getCpuOffload() &&
        gather.getShards().front().getDefiningOp<ReadOp>())
      return failPolicy(unit);
  }
  return success();
}
