//===- ChooseMemory.cpp - the fastest step that fits ----------------------===//
#include "fsdp/Transforms/ExploreMemory.h"
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/Schedule.h"
#include "mlir/IR/Remarks.h"
#include "llvm/Support/FormatVariadic.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_CHOOSEMEMORY
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;

namespace {
struct ChooseMemory : mlir::fsdp::impl::ChooseMemoryBase<ChooseMemory> {
  void runOnModule() override {
    ModuleOp module = getOperation();
    ScheduleOp schedule = getOrCreateSchedule(module);
    std::optional<uint64_t> budget = schedule.getMemoryBudget();
    if (!budget)
      return;
    // Which buckets fit is found out later.
    if (schedule.getBucket() == "optimal" && schedule.getMemory() == "policy")
      return;
    FailureOr<MemoryExplorer> explorer = MemoryExplorer::create(module);
    if (failed(explorer))
      return signalPassFailure();
    FailureOr<MemoryOutcome> policy = explorer->evaluate({});
    if (failed(policy))
      return signalPassFailure();
    bool chooses = schedule.getMemory() == "auto";
    std::string holders = explorer->holders();
    bool fits = policy->bytes <= int64_t(*budget);
    if (fits && !chooses)
      return;
    FailureOr<std::optional<MemoryOutcome>> best =
        findFastest(*explorer, int64_t(*budget));
    if (failed(best))
      return signalPassFailure();
    if (!chooses || !*best) {
      report(schedule, *explorer, *policy, holders, *best);
      return signalPassFailure();
    }
    explorer->apply((*best)->choice);
    remark::passed(schedule.getLoc(),
                   remark::RemarkOpts::name("Memory").category("fsdp-memory"))
        << explorer->describe((*best)->choice) + ": " +
               formatBytes((*best)->bytes) + " of " + formatBytes(*budget) +
               ", the fastest that fits of " +
               std::to_string(explorer->outcomes().size()) + " compiled" +
               llvm::formatv(
                   "; {0:F3} ms, {1:F1} % above {2:F3} ms of {3}, "
                   "which no choice can beat",
                   (*best)->seconds * 1e3, explorer->gapPercent(**best),
                   explorer->bound().seconds * 1e3, explorer->bound().of)
                   .str();
  }

private:
  static void report(ScheduleOp schedule, MemoryExplorer &explorer,
                     const MemoryOutcome &policy, const std::string &holders,
                     const std::optional<MemoryOutcome> &best) {
    const MemoryOutcome *least = &explorer.outcomes().front();
    for (const MemoryOutcome &outcome : explorer.outcomes())
      if (outcome.bytes < least->bytes)
        least = &outcome;
    auto error = schedule.emitOpError("expected a step of at most ");
    error << formatBytes(*schedule.getMemoryBudget())
          << " a rank, got: " << formatBytes(policy.bytes) << "; at its peak "
          << holders;
    if (best)
      error << "; it fits, with the least loss of time, if you "
            << explorer.describe(best->choice) << " ("
            << formatBytes(best->bytes) << ")";
    else
      error << "; the smallest that was found is " << formatBytes(least->bytes)
            << ": " << explorer.describe(least->choice);
  }
};
} // namespace
