//===- CheckpointFolder.h - the folder that a run's checkpoints are in ----===//
//
// What rank 0 does in the file system. The folder has
//
//   step-4                checkpoints, by the number of steps done
//   .inflight.<attempt>   a save that is under way, or was when it was killed
//   .trash.<attempt>      a checkpoint that is being removed
//
// and may have anything else, which stays untouched. A save becomes a
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
  /// Steps with a folder, ascending; of names "step-4" alone. None where the
  /// folder is not there. Throws InputError where it cannot be read.
  std::vector<int64_t> steps() const;
  /// Where the files of a save are until it is committed.
  std::string inFlight(const std::string &attempt) const {
    return path + "/.inflight." + attempt;
  }

  // Of the process that writes. They throw RunError.

  /// Makes the folder, and keeps other runs from writing there until this
  /// process ends, as far as its file system has locks. One that ends just now
  /// is waited for. Throws InputError if another run has it, or it cannot be
  /// made. Once it is open, nothing more happens.
  void open(std::chrono::milliseconds patience = std::chrono::seconds(10));
  /// Removes what killed saves have left, and makes the folder of a new one,
  /// in which there must be room for so many bytes. Returns its path.
  std::string begin(const std::string &attempt, uint64_t bytes);
  /// Makes it the checkpoint of a step, for good when this returns. One of the
  /// same step that is there is an error, unless it is known to be damaged.
  void commit(const std::string &attempt, int64_t step, Progress &progress);
  /// Removes the folder of a save. Never throws.
  void abandon(const std::string &attempt);
  /// Removes the checkpoints before the newest `keep` whole ones.
  void retire(int64_t keep, Progress &progress);

  /// Lets the checkpoint of a step be replaced.
  void setDamaged(int64_t step) { damaged.insert(step); }
  bool isDamaged(int64_t step) const { return damaged.contains(step); }

private:
  void removeLeftovers();
  /// Takes the name of a checkpoint; returns its new one.
  std::string discard(int64_t step);

  std::string path;
  std::set<int64_t> damaged;
  int fd = -1;
};

/// The newest checkpoint of the folder that opens and that `check` takes, by
/// default one whose files have their hashes; null if there is none. `skipped`
/// hears why a newer one is not it.
std::unique_ptr<NativeCheckpoint>
openNewest(const CheckpointFolder &folder,
           const std::function<void(const std::string &)> &skipped,
           const std::function<void(const NativeCheckpoint &)> &check =
               &NativeCheckpoint::verifyAll);

/// 32 hex digits that nobody has used.
std::string newAttempt();

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CHECKPOINT_CHECKPOINTFOLDER_H
