//===- CheckpointFolder.h - the folder that a run's checkpoints are in ----===//
//
// What rank 0 does in the file system. The folder contains
//
//   step-4                checkpoints, named by the number of steps done
//   .inflight.<attempt>   a save that is in flight, or was when it was killed
//   .trash.<attempt>      a checkpoint that is being removed
//
// and may contain anything else, which stays untouched. A save becomes a
// checkpoint by one rename.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_CHECKPOINT_CHECKPOINTFOLDER_H
#define FSDP_RUNTIME_CHECKPOINT_CHECKPOINTFOLDER_H

#include "fsdp/Runtime/Checkpoint/NativeCheckpoint.h"
#include "fsdp/Runtime/Checkpoint/Progress.h"

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace fsdp::runtime {

class CheckpointFolder {
public:
  /// Nothing is read or written yet.
  explicit CheckpointFolder(std::string path) : path(std::move(path)) {}
  CheckpointFolder(const CheckpointFolder &) = delete;
  CheckpointFolder &operator=(const CheckpointFolder &) = delete;
  ~CheckpointFolder();

  /// "DIR/step-4".
  std::string pathOf(int64_t step) const;
  /// Steps with a folder, ascending; only names like "step-4" count. Empty if
  /// there is no folder. Throws InputError if the folder cannot be read.
  std::vector<int64_t> steps() const;
  /// Where the files of a save are until it is committed.
  std::string inFlight(const std::string &attempt) const {
    return path + "/.inflight." + attempt;
  }

  // For the process that writes. These throw RunError.

  /// Creates the folder, and keeps other runs from writing there until this
  /// process ends, provided that its file system has locks. Waits for a run
  /// that is just ending. Throws InputError if another run has the folder, or
  /// if it cannot be created. Does nothing if the folder is already open.
  void open(std::chrono::milliseconds patience = std::chrono::seconds(10));
  /// Removes what killed saves have left, and creates the folder of a new save,
  /// which must have room for so many bytes. Returns its path.
  std::string begin(const std::string &attempt, uint64_t bytes);
  /// Makes the save the checkpoint of a step; it is durable when this returns.
  /// An existing checkpoint of the same step is an error, unless it is known to
  /// be damaged.
  void commit(const std::string &attempt, int64_t step, Progress &progress);
  /// Removes the folder of a save. Never throws.
  void abandon(const std::string &attempt);
  /// Removes all checkpoints but `keep` whole ones: that of step `saved`, and
  /// the newest of the others. They may be newer, if the run went on from an
  /// older one.
  void retire(int64_t keep, int64_t saved, Progress &progress);

  /// Lets the checkpoint of a step be replaced.
  void setDamaged(int64_t step) { damaged.insert(step); }
  bool isDamaged(int64_t step) const { return damaged.contains(step); }

private:
  void removeLeftovers();
  /// Renames a checkpoint out of the way; returns its new name.
  std::string discard(int64_t step);

  std::string path;
  std::set<int64_t> damaged;
  int fd = -1;
};

/// The newest checkpoint in the folder that can be opened and that `check`
/// accepts, by default one whose files match their hashes; null if there is
/// none. `skipped` is told why a newer one is not taken.
std::unique_ptr<NativeCheckpoint>
openNewest(const CheckpointFolder &folder,
           const std::function<void(const std::string &)> &skipped,
           const std::function<void(const NativeCheckpoint &)> &check =
               &NativeCheckpoint::verifyAll);

/// 32 hex digits that have never been used before.
std::string newAttempt();

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CHECKPOINT_CHECKPOINTFOLDER_H
