//===- ScheduleOps.cpp - futures, and a schedule's policy ---------------===//
#include "fsdp/Dialect/FSDP.h"

using namespace mlir;
using namespace mlir::fsdp;

#include "fsdp/Dialect/FSDPInterfaces.cpp.inc"

Operation *mlir::fsdp::getProducer(Value value) {
  Operation *op = getYielded(value).getDefiningOp();
  if (auto wait = dyn_cast_or_null<WaitOp>(op))
    return wait.getFuture().getDefiningOp();
  return op;
}

AllGatherOp mlir::fsdp::getGather(Value param) {
  return dyn_cast_or_null<AllGatherOp>(getProducer(param));
}

Operation *mlir::fsdp::getResultsOp(Operation *collective) {
  if (collective->getNumResults() == 1 &&
      isa<FutureType>(collective->getResult(0).getType()) &&
      collective->hasOneUse())
    return *collective->user_begin();
  return collective;
}

LogicalResult StageStateOp::verifySymbolUses(SymbolTableCollection &symbols) {
  if (!symbols.lookupNearestSymbolFrom<UnitOp>(*this, getUnitAttr()))
    return emitOpError("StageState-1: expected a unit, got: ") << getUnitAttr();
  if (!getStaged().getType().getTypes().empty())
    return emitOpError("StageState-1: expected a future without results, got: ")
           << getStaged().getType();
  return success();
}

int64_t ScheduleOp::getNumReducesInFlight() {
  return int64_t(getReduceScattersInFlight().value_or(2));
}

LogicalResult ScheduleOp::verify() {
  auto expect = [&](StringRef key, StringRef value,
                    ArrayRef<StringRef> known) -> LogicalResult {
    if (llvm::is_contained(known, value))
      return success();
    auto error = emitOpError("Schedule-1: expected ") << key << " ";
    llvm::interleave(
        known, error, [&](StringRef name) { error << '"' << name << '"'; },
        ", ");
    return error << ", got: \"" << value << '"';
  };
  if (failed(expect("prefetch", getPrefetch(),
                    {"latest_safe", "fsdp2", "none"})) ||
      failed(expect("bucket", getBucket(),
                    {"unit", "parameter", "saturation", "optimal"})) ||
      failed(expect("memory", getMemory(), {"policy", "auto"})) ||
      failed(expect("fuse", getFuse(), {"none", "exact", "unproven"})))
    return failure();
  if (int64_t inFlight = getNumReducesInFlight(); inFlight < 1)
    return emitOpError("Schedule-1: expected at least one reduce-scatter in "
                       "flight, got: ")
           << inFlight;
  IntegerAttr budget = getMemoryBudgetAttr();
  if (budget && budget.getInt() < 1)
    return emitOpError("Schedule-1: expected a positive memory_budget, got: ")
           << budget.getInt();
  if (!budget && getMemory() == "auto")
    return emitOpError("Schedule-1: expected a memory_budget with memory "
                       "\"auto\"");
  return success();
}
