//===- Reporter.h - the progress of a run, as rank 0 tells it -------------===//
#ifndef FSDP_RUNTIME_LAUNCH_REPORTER_H
#define FSDP_RUNTIME_LAUNCH_REPORTER_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Collectives/Comm.h"
#include "fsdp/Runtime/Execution/Executor.h"
#include "fsdp/Runtime/Files/Files.h"
#include "fsdp/Runtime/Launch/Checkpointer.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::runtime {

/// The progress line on stderr and the metrics file.
class Reporter {
public:
  /// Borrows the plan. `path`: the metrics file; empty: none. Of one that is
  /// there the lines of the first `steps` steps stay. Throws InputError.
  Reporter(const plan::Plan &plan, const std::string &path, int64_t steps = 0);

  /// Of a step, counted from 0, that took `seconds`. `result` is rank 0's; of
  /// it the loss alone differs between ranks. `stats` are those of all ranks.
  void report(int64_t step, double seconds, const StepResult &result,
              const std::vector<RankStats> &stats, const RankArena &memory,
              bool evaluated, const std::optional<SaveReport> &saved);

  /// The run ends after `step` as it was asked to, with a checkpoint or
  /// without.
  void stopped(int64_t step, uint32_t requests, bool saved) const;

private:
  /// Once, where a rank's loss or gradient is no number any more.
  void warn(int64_t step, const StepResult &result,
            const std::vector<RankStats> &stats);

  const plan::Plan &plan;
  int64_t tokens;
  bool warned = false;
  std::optional<LineFile> file;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_LAUNCH_REPORTER_H
