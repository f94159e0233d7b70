//===- ChooseMemory.cpp - the fastest step that fits ----------------------===//
//
// The blocks of a model are alike, so time and memory are linear in the number
// of blocks that recompute, up to what overlaps. Both ends of each line are
// compiled; between them the crossing with the budget is a guess that is
// compiled too, and corrected.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Transforms/ExploreMemory.h"
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/Schedule.h"
#include "mlir/IR/Remarks.h"

#include <cmath>

namespace mlir::fsdp {
#define GEN_PASS_DEF_CHOOSEMEMORY
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;

namespace {
struct ChooseMemory : mlir::fsdp::impl::ChooseMemoryBase<ChooseMemory> {
  void runOnOperation() override {
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
        search(*explorer, int64_t(*budget));
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
               std::to_string(explorer->outcomes().size()) + " compiled";
  }

private:
  /// The fastest outcome within the budget; none if nothing fits.
  static FailureOr<std::optional<MemoryOutcome>>
  search(MemoryExplorer &explorer, int64_t budget) {
    for (MemoryChoice::Reshard reshard : explorer.reshards()) {
      FailureOr<MemoryOutcome> none = explorer.evaluate({reshard});
      if (failed(none))
        return failure();
      if (none->bytes <= budget)
        continue; // recomputing more makes it slower
      for (MemoryChoice::Recompute recompute : explorer.recomputations()) {
        MemoryChoice choice{reshard, recompute, explorer.numBlocks()};
        FailureOr<MemoryOutcome> all = explorer.evaluate(choice);
        if (failed(all))
          return failure();
        if (all->bytes > budget || all->bytes >= none->bytes)
          continue;
        double saved =
            double(none->bytes - all->bytes) / double(explorer.numBlocks());
        choice.blocks = 0;
        int64_t bytes = none->bytes;
        for (int attempt = 0; attempt < 4 && bytes > budget; ++attempt) {
          choice.blocks = std::min<int64_t>(
              explorer.numBlocks(),
              choice.blocks +
                  std::max<int64_t>(1,
                                    std::ceil(double(bytes - budget) / saved)));
          FailureOr<MemoryOutcome> some = explorer.evaluate(choice);
          if (failed(some))
            return failure();
          bytes = some->bytes;
        }
      }
    }
    std::optional<MemoryOutcome> best;
    for (const MemoryOutcome &outcome : explorer.outcomes())
      if (outcome.bytes <= budget && (!best || outcome.seconds < best->seconds))
        best = outcome;
    return best;
  }

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
      error << "; the least that was found is " << formatBytes(least->bytes)
            << ": " << explorer.describe(least->choice);
  }
};
} // namespace
