//===- LatestSafeLaunch.h - when to launch gathers, on numbers ------------===//
//
// The decision of fsdp-prefetch-all-gathers without its IR. One compute stream
// goes through positions in order; one link performs gathers in order, one at a
// time. Compute stands still at the first use of a gather that has not ended.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_LIB_TRANSFORMS_SCHEDULE_LATESTSAFELAUNCH_H
#define FSDP_LIB_TRANSFORMS_SCHEDULE_LATESTSAFELAUNCH_H

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace fsdp::schedule {

struct GatherToLaunch {
  double seconds = 0; ///< on the link
  int64_t bytes = 0;  ///< held from the launch on
  /// The first position that it may be launched before.
  size_t earliest = 0;
  /// The last such position: where it is if it is not moved.
  size_t latest = 0;
  /// The position that cannot begin before it has ended; not before `latest`.
  size_t use = 0;
  /// FSDP2 launches ahead only within one phase.
  int phase = 0;
};

struct LaunchProblem {
  /// Seconds of compute before each position, and before the end.
  std::vector<double> time;
  /// Bytes alive at each position, those of a gather from `latest` on.
  std::vector<int64_t> live;
  /// The limit on the bytes alive; a gather that does not fit at `latest` is
  /// launched there all the same.
  std::optional<int64_t> budget;
  /// In the order on the link, which is that of `latest` and of `use`.
  std::vector<GatherToLaunch> gathers;
  /// The fraction of a gather's duration by which it is launched earlier than
  /// needed.
  double reserve = 0;
};

/// What kept a gather from being launched later (Duration), or earlier.
enum class LaunchLimit : uint8_t {
  Duration,  ///< later it would not be hidden
  StepBegin, ///< nothing comes before it
  Link,      ///< the link is busy until then
  Needs,     ///< GatherToLaunch::earliest
  Order,     ///< the launch of the gather before it
  Budget,
  FSDP2, ///< its order
};

struct Launch {
  size_t at = 0; ///< launched before this position
  LaunchLimit limit = LaunchLimit::Duration;
  /// Seconds for which compute stands still at its first use.
  double stall = 0;
  /// With LaunchLimit::Budget: bytes alive if it were launched earlier.
  int64_t excess = 0;
};

/// Latest-safe launch: as late as delays nothing, so that a gather holds its
/// bytes for the shortest time; where that is not possible, as soon as it can
/// begin on the link, what it needs is there, and it fits into the budget from
/// there on. Of positions between which compute does nothing, the last.
///
/// From the last gather to the first, the latest begin is its duration before
/// its first use and before the next one can begin. From the first to the last,
/// what compute has stood still so far moves all that follows.
///
/// LatestSafeLaunchTest compares with all launches in this order, of small
/// random instances: no step was shorter, and without a budget none of the same
/// length held its bytes for a shorter time; with one, some did (the test
/// prints how many, and by how much).
///
/// O(n^2 log n + p) for n gathers and p positions; with a budget O(n p) more.
std::vector<Launch> latestSafeLaunches(const LaunchProblem &problem);

/// FSDP2's order: a gather is launched when the one before it, of the same
/// phase, is complete; the first of a phase where it is needed.
std::vector<Launch> fsdp2Launches(const LaunchProblem &problem);

} // namespace fsdp::schedule

#endif // FSDP_LIB_TRANSFORMS_SCHEDULE_LATESTSAFELAUNCH_H
