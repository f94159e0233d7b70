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

/// Where a step's numbers are none any more.
struct NotFinite {
  int64_t rank = -1; ///< -1: all of them alike
  std::string text;  ///< "rank 1: the loss is nan"
};

/// The first of a step, the same on every rank; a step that the gradient scaler
/// skipped is none.
std::optional<NotFinite> findNotFinite(const plan::Plan &plan,
                                       const StepResult &result,
                                       const std::vector<RankStats> &stats);

/// How much longer the steps after a save take than those before it.
class SaveSlowdown {
public:
  static constexpr size_t kSteps = 10;

  /// The next step of the run has taken so long.
  void step(double seconds) { times.push_back(seconds); }
  /// One was saved, when so many steps of this process were done.
  void saved(size_t steps) { saves.push_back(steps); }
  /// The mean time of the ten steps after a save by that of the ten before it,
  /// once, when they are done; nullopt where another save is near, or the first
  /// step of the process, which is none like the others.
  std::optional<double> take();

private:
  std::vector<double> times;
  std::vector<size_t> saves;
  size_t told = 0; ///< of the saves
};

/// What a Reporter writes, and what it needs for that.
struct ReportSettings {
  std::string metricsPath;       ///< empty: none
  std::string tensorboardFolder; ///< empty: none
  int64_t steps = 0;             ///< of the run in all, for the time left
  int64_t checkpointEvery = 0;   ///< steps; 0: as it is asked to
  /// FLOP/s of a rank's device in the dtype of most of the plan's; without
  /// them there is no MFU.
  std::optional<double> peakFlops;
};

/// The progress line on stderr, the metrics file, and scalars for TensorBoard.
class Reporter {
public:
  /// Borrows the plan. Of a metrics file that is there the lines of the first
  /// `stepsDone` steps stay. Throws InputError.
  Reporter(const plan::Plan &plan, const ReportSettings &settings,
           int64_t stepsDone = 0);

  /// Of a step, counted from 0, that took `seconds`. `result` is rank 0's; of
  /// it the loss alone differs between ranks. `stats` are those of all ranks.
  void report(int64_t step, double seconds, const StepResult &result,
              const std::vector<RankStats> &stats, const RankArena &memory,
              bool evaluated, const std::optional<SaveReport> &saved);

  /// The run ends after `step` as it was asked to, with a checkpoint or
  /// without.
  void stopped(int64_t step, uint32_t requests, bool saved) const;
  /// It was asked to save after `step`, and has nowhere to.
  void cannotSave(int64_t step) const;

private:
  /// What a step comes to over all ranks.
  struct Summary;
  Summary summarise(int64_t step, double seconds, const StepResult &result,
                    const std::vector<RankStats> &stats);
  void printLine(int64_t step, const Summary &summary,
                 const StepResult &result) const;
  void writeMetrics(int64_t step, const Summary &summary,
                    const StepResult &result, const RankArena &memory,
                    const std::optional<SaveReport> &saved);
  void writeScalars(int64_t step, const Summary &summary,
                    const StepResult &result);

  const plan::Plan &plan;
  const ReportSettings settings;
  const int64_t tokens;
  /// Of a rank's step.
  const double modelFlops;
  /// Smoothed, from one report to the next: with evaluations and saves.
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
