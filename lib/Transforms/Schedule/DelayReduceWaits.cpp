//===- DelayReduceWaits.cpp - reduce while computation goes on ------------===//
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/Schedule.h"
#include "fsdp/Transforms/StepProgram.h"
#include "mlir/IR/Remarks.h"
#include "llvm/ADT/TypeSwitch.h"
#include "llvm/Support/FormatVariadic.h"

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

/// What takes the results of a reduction, for people; where the loop yields
/// them, what takes those of the loop.
static std::string describeUse(Operation *use) {
  if (isa<YieldOp>(use))
    if (Operation *outside = getFirstUser(use->getParentOp()))
      use = outside;
  return llvm::TypeSwitch<Operation *, std::string>(use)
      .Case<AllReduceOp>([](auto) { return "its all-reduce"; })
      .Case<AccumulateOp>([](auto) { return "the sums of the microbatches"; })
      .Case<CopyToHostOp>([](auto) { return "its copy to the host"; })
      .Case<UnscaleOp>([](auto) { return "the unscaling"; })
      .Case<ClipGradNormOp>([](auto) { return "the clipping"; })
      .Case<OptimizerStepOp>([](auto) { return "the optimizer"; })
      .Default(
          [](Operation *op) { return op->getName().getStringRef().str(); });
}

/// Calls between two ops of a block.
static int64_t countCalls(Operation *from, Operation *to) {
  return llvm::count_if(
      llvm::make_range(from->getIterator(), to->getIterator()),
      llvm::IsaPred<aten::CallOp>);
}

namespace {
struct DelayReduceWaits
    : mlir::fsdp::impl::DelayReduceWaitsBase<DelayReduceWaits> {
  void runOnModule() override {
    ModuleOp module = getOperation();
    ProgramOp program = getProgram(module);
    if (!program)
      return signalPassFailure();
    inFlight = getOrCreateSchedule(module).getNumReducesInFlight();
    SmallVector<ReduceScatterOp> begun;
    for (auto reduce : getMicrobatchOps<ReduceScatterOp>(program))
      if (getWait(reduce))
        begun.push_back(reduce);
    for (size_t i = 0; i < begun.size(); ++i)
      delay(begun[i],
            i + inFlight < begun.size() ? begun[i + inFlight] : nullptr);

    SmallVector<CopyToHostOp> copies;
    for (auto copy : getMicrobatchOps<CopyToHostOp>(program))
      if (getWait(copy))
        copies.push_back(copy);
    for (CopyToHostOp copy : copies)
      beginEarly(copy);
    llvm::sort(copies, [](CopyToHostOp a, CopyToHostOp b) {
      return a->isBeforeInBlock(b);
    });
    for (size_t i = 0; i < copies.size(); ++i)
      delay(copies[i],
            i + inFlight < copies.size() ? copies[i + inFlight] : nullptr);
  }

private:
  /// Moves the wait behind what may run during the reduction: to `limit`, or
  /// its first use. An all-reduce of the results goes along, and the wait for
  /// that to its own first use.
  void delay(ReduceScatterOp reduce, ReduceScatterOp limit) {
    WaitOp wait = getWait(reduce);
    Operation *use = getFirstUser(wait);
    AllReduceOp all = dyn_cast_or_null<AllReduceOp>(use);
    Operation *end = use; // what takes the results in the end
    if (all) {
      WaitOp allWait = getWait(all);
      end = getFirstUser(allWait ? allWait.getOperation() : all.getOperation());
      if (allWait && end)
        allWait->moveBefore(end);
      use = allWait ? allWait.getOperation() : end;
    }
    bool limited = limit && (!use || limit->isBeforeInBlock(use));
    Operation *to = limited ? limit.getOperation() : use;
    if (!to)
      return;
    wait->moveBefore(to);
    if (all)
      all->moveBefore(to);
    explain(reduce, all, limited ? limit : ReduceScatterOp(), wait, end);
  }

  /// Moves the copy to behind what makes its operands.
  static void beginEarly(CopyToHostOp copy) {
    Operation *last = nullptr;
    for (Value grad : copy.getGrads())
      if (Operation *op = grad.getDefiningOp();
          op && (!last || last->isBeforeInBlock(op)))
        last = op;
    if (last)
      copy->moveAfter(last);
  }

  /// Moves the wait to its first use, or `limit`.
  static void delay(CopyToHostOp copy, CopyToHostOp limit) {
    WaitOp wait = getWait(copy);
    Operation *use = getFirstUser(wait);
    bool limited = limit && (!use || limit->isBeforeInBlock(use));
    if (Operation *to = limited ? limit.getOperation() : use)
      wait->moveBefore(to);
    setReason(copy,
              "begins when the shards are reduced; awaited " +
                  (limited ? llvm::formatv("before the copy of {0} begins",
                                           limit.getUnit())
                                 .str()
                   : use   ? "before its first use, " + describeUse(use)
                           : std::string("at the end of the step")));
  }

  /// Says where the waits went; `limit` is null where the reduction may go on
  /// to `end`, the first use.
  void explain(ReduceScatterOp reduce, AllReduceOp all, ReduceScatterOp limit,
               WaitOp wait, Operation *end) {
    std::string until =
        limit ? llvm::formatv("before the reduce-scatter of {0} begins, as "
                              "{1} may be in flight",
                              limit.getUnit(), inFlight)
                    .str()
        : all ? "where its all-reduce begins"
        : end ? "before its first use, " + describeUse(end)
              : "at the end of the step";
    setReason(reduce,
              "begins when the last gradient is there; awaited " + until);
    if (all)
      setReason(all, "begins when the shards are reduced; awaited " +
                         (end ? "before its first use, " + describeUse(end)
                              : std::string("at the end of the step")));
    auto opts =
        remark::RemarkOpts::name("ReduceScatter").category("fsdp-reduce");
    auto message = limit ? remark::missed(reduce.getLoc(), opts)
                         : remark::passed(reduce.getLoc(), opts);
    int64_t calls = countCalls(reduce, wait);
    if (message)
      message << llvm::formatv(
                     "unit {0}: reduced beside {1} call{2}, awaited {3}",
                     reduce.getUnit(), calls, calls == 1 ? "" : "s", until)
                     .str();
  }

  int64_t inFlight = 0;
};
} // namespace
