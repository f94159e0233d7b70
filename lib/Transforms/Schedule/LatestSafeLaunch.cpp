//===- LatestSafeLaunch.cpp - when to launch gathers, on numbers ----------===//
#include "LatestSafeLaunch.h"

#include <algorithm>

namespace fsdp::schedule {

namespace {

class Launcher {
public:
  explicit Launcher(const LaunchProblem &problem)
      : problem(problem), live(problem.live) {}

  std::vector<Launch> latestSafe() {
    for (size_t k = 0; k < problem.gathers.size(); ++k) {
      const GatherToLaunch &gather = problem.gathers[k];
      double wanted = latestBegin(k);
      Launch launch;
      if (double free = linkFree - problem.reserve * gather.seconds;
          k > 0 && free > wanted) {
        wanted = free;
        launch.limit = LaunchLimit::Link;
      } else if (wanted < 0) {
        launch.limit = LaunchLimit::StepBegin;
      }
      launch.at = lastUpTo(wanted, gather.latest);
      settle(gather, launch);
    }
    return std::move(launches);
  }

  std::vector<Launch> likeFSDP2() {
    for (size_t k = 0; k < problem.gathers.size(); ++k) {
      const GatherToLaunch &gather = problem.gathers[k];
      bool first = k == 0 || problem.gathers[k - 1].phase != gather.phase;
      Launch launch;
      launch.limit = LaunchLimit::FSDP2;
      launch.at = first
                      ? gather.latest
                      : std::min(problem.gathers[k - 1].use + 1, gather.latest);
      settle(gather, launch);
    }
    return std::move(launches);
  }

private:
  /// When the gather must begin to delay nothing that can be in time.
  double latestBegin(size_t index) const {
    double next = problem.time.back() + stalled();
    for (size_t k = problem.gathers.size(); k-- > index;) {
      const GatherToLaunch &gather = problem.gathers[k];
      double needed = problem.time[gather.use] + stalled();
      next = std::min(next, needed) - gather.seconds * (1 + problem.reserve);
      if (k != index)
        next = std::max(next, timeOf(gather.earliest));
    }
    return next;
  }

  /// Seconds that compute has stood still at first uses so far.
  double stalled() const { return stalls.empty() ? 0 : stalls.back().total; }

  /// When compute comes to a position.
  double timeOf(size_t position) const {
    auto after = std::lower_bound(
        stalls.begin(), stalls.end(), position,
        [](const Stall &stall, size_t at) { return stall.use < at; });
    return problem.time[position] +
           (after == stalls.begin() ? 0 : std::prev(after)->total);
  }

  /// The last position up to `end` to which compute comes by `seconds`.
  size_t lastUpTo(double seconds, size_t end) const {
    size_t low = 0;
    while (low < end) {
      size_t middle = low + (end - low + 1) / 2;
      if (timeOf(middle) <= seconds)
        low = middle;
      else
        end = middle - 1;
    }
    return low;
  }

  /// Moves the launch to where it is possible, and performs it.
  void settle(const GatherToLaunch &gather, Launch &launch) {
    size_t previous = launches.empty() ? 0 : launches.back().at;
    if (gather.earliest > launch.at && gather.earliest >= previous) {
      launch.at = gather.earliest;
      launch.limit = LaunchLimit::Needs;
    } else if (previous > launch.at) {
      launch.at = previous;
      launch.limit = LaunchLimit::Order;
    }
    launch.at = std::min(launch.at, gather.latest);
    if (size_t fits = firstFit(gather, launch.at); fits > launch.at) {
      launch.at = fits;
      launch.limit = LaunchLimit::Budget;
      launch.excess = live[fits - 1] + gather.bytes;
    }
    while (launch.at < gather.latest &&
           timeOf(launch.at) == timeOf(launch.at + 1))
      ++launch.at;
    for (size_t i = launch.at; i < gather.latest; ++i)
      live[i] += gather.bytes;
    linkFree = std::max(timeOf(launch.at), linkFree) + gather.seconds;
    launch.stall =
        std::max(0.0, linkFree - problem.time[gather.use] - stalled());
    if (launch.stall > 0)
      stalls.push_back({gather.use, stalled() + launch.stall});
    launches.push_back(launch);
  }

  /// The first position at or after `at` from which on the gather fits.
  size_t firstFit(const GatherToLaunch &gather, size_t at) const {
    if (!problem.budget)
      return at;
    size_t fits = gather.latest;
    while (fits > at && live[fits - 1] + gather.bytes <= *problem.budget)
      --fits;
    return fits;
  }

  /// Compute stands still before position `use`; `total` is up to its end.
  struct Stall {
    size_t use;
    double total;
  };

  const LaunchProblem &problem;
  std::vector<int64_t> live;
  std::vector<Stall> stalls;
  double linkFree = 0;
  std::vector<Launch> launches;
};

} // namespace

std::vector<Launch> latestSafeLaunches(const LaunchProblem &problem) {
  return Launcher(problem).latestSafe();
}

std::vector<Launch> fsdp2Launches(const LaunchProblem &problem) {
  return Launcher(problem).likeFSDP2();
}

} // namespace fsdp::schedule
