//===- SearchMemory.cpp - the fastest choice that fits --------------------===//
//
// The blocks of a model are alike, so time and memory are linear in the number
// of blocks that recompute, up to what overlaps. Of each line (a way to
// reshard, reductions in flight, a way to recompute) the ends are compiled.
// Where the budget lies between them, the crossing is a guess, which is
// compiled and corrected: of the lines, the one that looks fastest there first,
// and none that looks slower than what is found. Then, of the fastest, it is
// tried which blocks recompute.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Transforms/ExploreMemory.h"

#include <cmath>

using namespace mlir;
using namespace mlir::fsdp;

namespace {
class Search {
public:
  Search(MemoryExplorer &explorer, int64_t budget)
      : explorer(explorer), budget(budget) {}

  LogicalResult run() {
    for (MemoryChoice::Reshard reshard : explorer.reshards())
      for (int64_t inFlight : explorer.reducesInFlight()) {
        FailureOr<bool> any = addLines(reshard, inFlight);
        if (failed(any))
          return failure();
        if (!*any)
          break; // more in flight takes more
      }
    llvm::sort(lines, [](const Line &a, const Line &b) {
      return a.crossing() < b.crossing();
    });
    for (const Line &line : lines)
      if (!best() || line.crossing() < best()->seconds)
        if (failed(follow(line, kAttempts)))
          return failure();
    return placeBlocks();
  }

  std::optional<MemoryOutcome> best() const {
    std::optional<MemoryOutcome> best;
    for (const MemoryOutcome &outcome : explorer.outcomes())
      if (outcome.bytes <= budget &&
          (!best || std::pair(outcome.seconds, outcome.bytes) <
                        std::pair(best->seconds, best->bytes)))
        best = outcome;
    return best;
  }

private:
  /// Choices compiled for one crossing.
  static constexpr int kAttempts = 4;

  /// Outcomes with ever more blocks that recompute, the first over the budget
  /// and the last within.
  struct Line {
    MemoryOutcome over, within;
    int64_t budget;

    /// The fraction of the way from `over` to `within` at which the budget is
    /// met.
    double share() const {
      return double(over.bytes - budget) / double(over.bytes - within.bytes);
    }
    /// Seconds there.
    double crossing() const {
      return over.seconds + share() * (within.seconds - over.seconds);
    }
    int64_t length() const { return within.choice.blocks - over.choice.blocks; }
  };

  /// False if nothing of this kind fits.
  FailureOr<bool> addLines(MemoryChoice::Reshard reshard, int64_t inFlight) {
    MemoryChoice choice{reshard};
    choice.inFlight = inFlight;
    // Without Products, which keeps more than Full.
    SmallVector<MemoryChoice> least;
    for (MemoryChoice::Recompute recompute :
         llvm::reverse(explorer.recomputations()))
      if (recompute != MemoryChoice::Recompute::Products) {
        least.push_back(choice);
        least.back().recompute = recompute;
        least.back().blocks = explorer.numBlocks();
      }
    if (least.empty())
      least = {choice};
    bool fits = false;
    for (const MemoryChoice &one : least)
      if (!fits) {
        FailureOr<MemoryOutcome> outcome = explorer.evaluate(one);
        if (failed(outcome))
          return failure();
        fits = outcome->bytes <= budget;
      }
    if (!fits)
      return false;
    FailureOr<MemoryOutcome> none = explorer.evaluate(choice);
    if (failed(none))
      return failure();
    if (none->bytes <= budget)
      return true; // recomputing more makes it slower
    for (MemoryChoice::Recompute recompute : explorer.recomputations()) {
      choice.recompute = recompute;
      choice.blocks = explorer.numBlocks();
      FailureOr<MemoryOutcome> all = explorer.evaluate(choice);
      if (failed(all))
        return failure();
      if (all->bytes <= budget)
        lines.push_back({*none, *all, budget});
    }
    return true;
  }

  /// The fewest blocks that fit, by regula falsi.
  LogicalResult follow(Line line, int attempts) {
    for (; attempts > 0 && line.length() > 1; --attempts) {
      MemoryChoice choice = line.within.choice;
      auto step = int64_t(std::ceil(line.share() * double(line.length())));
      choice.blocks = line.over.choice.blocks +
                      std::clamp<int64_t>(step, 1, line.length() - 1);
      FailureOr<MemoryOutcome> outcome = explorer.evaluate(choice);
      if (failed(outcome))
        return failure();
      (outcome->bytes <= budget ? line.within : line.over) = *outcome;
    }
    return success();
  }

  /// Tries as many blocks elsewhere, and fewer if that fits.
  LogicalResult placeBlocks() {
    std::optional<MemoryOutcome> found = best();
    if (!found || found->choice.blocks == 0)
      return success();
    MemoryChoice nothing{found->choice.reshard};
    nothing.inFlight = found->choice.inFlight;
    FailureOr<MemoryOutcome> none = explorer.evaluate(nothing);
    if (failed(none))
      return failure();
    if (none->bytes <= budget)
      return success();
    for (auto which :
         {MemoryChoice::Which::Spread, MemoryChoice::Which::Last}) {
      MemoryOutcome within = *found;
      within.choice.which = which;
      // All blocks are the same ones everywhere.
      if (within.choice.blocks < explorer.numBlocks()) {
        FailureOr<MemoryOutcome> moved = explorer.evaluate(within.choice);
        if (failed(moved))
          return failure();
        within = *moved;
      }
      if (within.bytes <= budget &&
          failed(follow({*none, within, budget}, kAttempts)))
        return failure();
    }
    return success();
  }

  MemoryExplorer &explorer;
  const int64_t budget;
  SmallVector<Line> lines;
};
} // namespace

FailureOr<std::optional<MemoryOutcome>>
mlir::fsdp::findFastest(MemoryExplorer &explorer, int64_t budget) {
  Search search(explorer, budget);
  if (failed(search.run()))
    return failure();
  return search.best();
}
