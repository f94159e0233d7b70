//===- Schedule.cpp - the policy of the scheduling passes -----------------===//
#include "fsdp/Transforms/Schedule.h"

#include "mlir/IR/Builders.h"

using namespace mlir;
using namespace mlir::fsdp;

ScheduleOp mlir::fsdp::getSchedule(ModuleOp module) {
  for (auto schedule : module.getOps<ScheduleOp>())
    return schedule;
  auto builder = OpBuilder::atBlockBegin(module.getBody());
  OperationState state(module.getLoc(), ScheduleOp::getOperationName());
  return cast<ScheduleOp>(builder.create(state));
}
