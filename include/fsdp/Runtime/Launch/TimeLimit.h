//===- TimeLimit.h - when a run must stop to end in time ------------------===//
#ifndef FSDP_RUNTIME_LAUNCH_TIMELIMIT_H
#define FSDP_RUNTIME_LAUNCH_TIMELIMIT_H

#include <algorithm>
#include <chrono>
#include <optional>

namespace fsdp::runtime {

/// Decides after every step whether there is time for another step and for a
/// save after it, assuming that each takes as long as the longest so far.
class TimeLimit {
public:
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;

  /// `limit` counts from `begun`; without it there is always time.
  TimeLimit(std::optional<double> limit, Clock::time_point begun)
      : limit(limit), begun(begun) {}

  /// The time from the end of one step to that of the next, with all that came
  /// between.
  void stepTook(Seconds time) { step = std::max(step, time); }
  void saveTook(Seconds time) { save = std::max(save, time); }

  /// `saves`: how many there may be until the run has stopped.
  bool isNear(int saves = 1, Clock::time_point now = Clock::now()) const {
    return limit && now - begun + step + saves * save > Seconds(*limit);
  }

private:
  const std::optional<double> limit;
  const Clock::time_point begun;
  Seconds step{0}, save{0};
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_LAUNCH_TIMELIMIT_H
