//===- DelayReduceWaits.cpp - reduce while computation goes on ------------===//
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/Schedule.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_DELAYREDUCEWAITS
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;

/// The wait for a collective that has begun; null for another op.
static WaitOp getWait(Operation *collective) {
  return dyn_cast<WaitOp>(getResultsOp(collective));
}

/// The first user of an op's results; null if there is none.
static Operation *getFirstUser(Operation *op) {
  Operation *first = nullptr;
  for (Operation *user : op->getUsers())
    if (!first || user->isBeforeInBlock(first))
      first = user;
  return first;
}

namespace {
struct DelayReduceWaits
    : mlir::fsdp::impl::DelayReduceWaitsBase<DelayReduceWaits> {
  void runOnOperation() override {
    ModuleOp module = getOperation();
    ProgramOp program = getProgram(module);
    if (!program)
      return signalPassFailure();
    size_t inFlight = getOrCreateSchedule(module).getReduceScattersInFlight();
    SmallVector<Operation *> begun;
    for (auto reduce : program.getOps<ReduceScatterOp>())
      if (getWait(reduce))
        begun.push_back(reduce);
    for (size_t i = 0; i < begun.size(); ++i)
      delay(begun[i],
            i + inFlight < begun.size() ? begun[i + inFlight] : nullptr);
  }

private:
  /// Moves the wait behind what may run during the reduction: to `limit`, or
  /// its first use. An all-reduce of the results goes along, and the wait for
  /// that to its own first use.
  static void delay(Operation *reduce, Operation *limit) {
    WaitOp wait = getWait(reduce);
    Operation *use = getFirstUser(wait);
    AllReduceOp all = dyn_cast_or_null<AllReduceOp>(use);
    if (all) {
      if (WaitOp allWait = getWait(all)) {
        if (Operation *allUse = getFirstUser(allWait))
          allWait->moveBefore(allUse);
        use = allWait;
      } else {
        use = getFirstUser(all);
      }
    }
    Operation *to =
        limit && (!use || limit->isBeforeInBlock(use)) ? limit : use;
    if (!to)
      return;
    wait->moveBefore(to);
    if (all)
      all->moveBefore(to);
  }
};
} // namespace
