//===- Checkpointer.h - a rank's part in the checkpoints of a run ---------===//
#ifndef FSDP_RUNTIME_LAUNCH_CHECKPOINTER_H
#define FSDP_RUNTIME_LAUNCH_CHECKPOINTER_H

#include "fsdp/Runtime/Checkpoint/Channel.h"
#include "fsdp/Runtime/Checkpoint/CheckpointFolder.h"
#include "fsdp/Runtime/Checkpoint/NativeCheckpoint.h"
#include "fsdp/Runtime/Checkpoint/Progress.h"
#include "fsdp/Runtime/Launch/RunFiles.h"
#include "fsdp/Runtime/Launch/SessionState.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace fsdp::runtime {

/// What became of a save.
struct SaveReport {
  int64_t step = 0;        ///< the step that was saved
  double stallSeconds = 0; ///< how long the run was stalled
  double seconds = 0;      ///< from its begin to its end
  uint64_t bytes = 0;      ///< of all ranks
  std::string error;       ///< why it failed; empty: it succeeded
};

/// checkOwn for the run's folder, if it has one.
void checkOwn(const CheckpointFolder &folder, const RunOptions &options,
              const NativeCheckpoint *chosen);
/// What differs from the run that saved the checkpoint, so that the bits of
/// later losses may differ; empty: nothing. Throws InputError for a difference
/// that is not allowed.
std::string compareRuns(const NativeCheckpoint &chosen, const RunFiles &files,
                        const RunOptions &options,
                        const std::string &dataFingerprint);

/// The folder --checkpoint, and --resume. All ranks call the same methods in
/// the same order, from one thread each.
class Checkpointer {
public:
  /// Borrows all but the channel. On rank 0 takes the folder. Throws InputError
  /// if it has checkpoints that this run does not continue from.
  Checkpointer(const RunFiles &files, const RunOptions &options, Device &device,
               Position &position, std::unique_ptr<Channel> channel);
  Checkpointer(const Checkpointer &) = delete;
  Checkpointer &operator=(const Checkpointer &) = delete;
  /// Gives up a save that is under way.
  ~Checkpointer();

  /// The checkpoint that the run continues from, once all ranks have verified
  /// it; null: none. Throws InputError if there are checkpoints, but none is
  /// valid.
  const NativeCheckpoint *choose();

  /// To be called when all of it has been read.
  void begin();

  /// Saves the state of the session after so many steps and samples, if a save
  /// is due or `asked` for, or this step is the `last`. With
  /// --checkpoint-async, it first waits for the previous save, and the new one
  /// is still being written when this returns; after the last step it waits for
  /// that one, too. Returns the save that has ended since the last call; rank 0
  /// reports it on stderr. Throws RunError for a save that fails, or
  /// AbortedError if another rank does; not for a save that runs in the
  /// background.
  std::optional<SaveReport> endStep(Session &session, int64_t step,
                                    int64_t samples, bool asked, bool last);
  /// Waits for the end of the save of an earlier step, if there is one, when
  /// the run ends without another save.
  void settle(Session &session) {
    writeStaged(session);
    collect();
  }
  /// Waits for the save that is under way, and for all ranks.
  void finish();

private:
  void save(Session &session, int64_t step, int64_t samples, bool last);
  /// Begins to write what the plan has staged since the last step.
  void writeStaged(Session &session);
  RunState stateOf(Session &session, int64_t step, int64_t samples) const;
  void chooseNewest(const std::vector<int64_t> &steps);
  void openFolder();
  void startWriting();
  void write(std::chrono::steady_clock::time_point begin);
  /// Waits for the save that is under way.
  void collect();
  /// Of the last save that has ended.
  void throwFailure() const;

  const RunFiles &files;
  const RunOptions &options;
  Device &device;
  std::unique_ptr<Channel> channel;
  Progress progress;
  CheckpointFolder folder;
  const std::string dataFingerprint; ///< reads files: once
  std::unique_ptr<NativeCheckpoint> chosen;
  std::string differences; ///< on rank 0, from the run that saved `chosen`
  std::string run;         ///< RunState::run
  int64_t resumedStep = -1;
  std::vector<int64_t> there; ///< steps in the folder when the run began
  std::unique_ptr<SessionState> source;
  /// Units that the plan stages beside the next step, where it does.
  std::set<int32_t> stagedByPlan;
  /// The next step copies what is saved.
  bool isStaging = false;
  std::chrono::steady_clock::time_point begun;

  /// What the writing thread owns until it has ended.
  struct Outcome {
    SaveReport report;
    std::string warning;
    int64_t failedRank = -1; ///< -1: none, or the run ends
  };
  SaveRequest request;
  Outcome current;
  std::atomic<bool> ended = false;
  bool isUnderWay = false;
  double stallSeconds = 0;
  std::thread thread;
  std::optional<SaveReport> report;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_LAUNCH_CHECKPOINTER_H
