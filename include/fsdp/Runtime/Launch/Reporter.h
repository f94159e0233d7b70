//===- Reporter.h - the progress of a run, as rank 0 tells it -------------===//
#ifndef FSDP_RUNTIME_LAUNCH_REPORTER_H
#define FSDP_RUNTIME_LAUNCH_REPORTER_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Collectives/Comm.h"
#include "fsdp/Runtime/Execution/Executor.h"
#include "fsdp/Runtime/Files/EventFile.h"
#include "fsdp/Runtime/Files/Files.h"
#include "fsdp/Runtime/Launch/Checkpointer.h"

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::runtime {

/// Units of training throughput in one rank's microbatch: tokens if an input is
/// a matrix of integers, else samples.
int64_t tokensPerStep(const plan::Plan &plan);

/// Where a step's numbers are no longer finite.
struct NotFinite {
  int64_t rank = -1; ///< -1: all of them alike
  std::string text;  ///< "rank 1: the loss is nan"
};

/// The first such place in a step, the same on every rank; a step that the
/// gradient scaler skipped has none.
std::optional<NotFinite> findNotFinite(const plan::Plan &plan,
                                       const StepResult &result,
                                       const std::vector<RankStats> &stats);

/// How much longer the steps after a save take than those before it.
class SaveSlowdown {
public:
  static constexpr size_t kSteps = 10;

  /// Records how long the next step of the run took.
  void step(double seconds) { times.push_back(seconds); }
  /// Records a save, made when so many steps of this process were done.
  void saved(size_t steps) { saves.push_back(steps); }
  /// The mean time of the ten steps after a save divided by that of the ten
  /// before it; given once, when they are done. nullopt if another save is too
  /// near, or the first step of the process, which is not like the others.
  std::optional<double> take();

private:
  std::vector<double> times;
  std::vector<size_t> saves;
  size_t told = 0; ///< saves reported so far
};

/// What a Reporter writes, and what it needs for that.
struct ReportSettings {
  std::string metricsPath;       ///< empty: none
  std::string tensorboardFolder; ///< empty: none
  int64_t steps = 0;             ///< of the run in all, for the time left
  int64_t checkpointEvery = 0;   ///< steps; 0: when asked to
  /// Peak FLOP/s of a rank's device, in the dtype of most of the plan's FLOPs;
  /// without it no MFU is reported.
  std::optional<double> peakFlops;
};

/// Bytes of the metrics file at `path` up to the last line of its first `steps`
/// steps; among these lines may be damaged ones. 0 if there is no file. Throws
/// InputError if `steps` is positive and the file has no line of metrics.
size_t bytesOfSteps(const std::string &path, int64_t steps);

/// The progress line on stderr, the metrics file, and scalars for TensorBoard.
class Reporter {
public:
  /// Borrows the plan. If there already is a metrics file, the lines of its
  /// first `stepsDone` steps are kept. Throws InputError.
  Reporter(const plan::Plan &plan, const ReportSettings &settings,
           int64_t stepsDone = 0);

  /// Reports a step, counted from 0, that took `seconds`. `result` is rank 0's;
  /// only its loss differs between ranks. `stats` are those of all ranks;
  /// `graphs` are rank 0's, if it captures its steps.
  void report(int64_t step, double seconds, const StepResult &result,
              const std::vector<RankStats> &stats, const RankArena &memory,
              const std::optional<StepGraphs> &graphs, bool evaluated,
              const std::optional<SaveReport> &saved);

  /// Reports that the run ends after `step` because it was asked to, with a
  /// checkpoint or without.
  void stopped(int64_t step, uint32_t requests, bool saved) const;
  /// Reports that the run was asked to save after `step`, but has nowhere to
  /// save to.
  void cannotSave(int64_t step) const;

private:
  /// The totals of a step over all ranks.
  struct Summary;
  Summary summarise(int64_t step, double seconds, const StepResult &result,
                    const std::vector<RankStats> &stats);
  void printLine(int64_t step, const Summary &summary,
                 const StepResult &result) const;
  void writeMetrics(int64_t step, const Summary &summary,
                    const StepResult &result, const RankArena &memory,
                    const std::optional<StepGraphs> &graphs,
                    const std::optional<SaveReport> &saved);
  void writeScalars(int64_t step, const Summary &summary,
                    const StepResult &result);

  const plan::Plan &plan;
  const ReportSettings settings;
  const int64_t tokens;
  /// Of a rank's step.
  const double modelFlops;
  /// Smoothed time from one report to the next, including evaluations and
  /// saves.
  std::optional<double> secondsPerStep;
  SaveSlowdown slowdown;
  const int64_t begin; ///< steps done before this process
  std::chrono::steady_clock::time_point before;
  bool warned = false;
  std::optional<LineFile> file;
  std::optional<EventFile> events;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_LAUNCH_REPORTER_H
