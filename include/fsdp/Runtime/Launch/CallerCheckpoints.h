//===- CallerCheckpoints.h - checkpoints of a caller's own tensors --------===//
//
// The same checkpoints as fsdp-run's, for a process that owns the tensors and
// the training loop itself: a step in Python.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_LAUNCH_CALLERCHECKPOINTS_H
#define FSDP_RUNTIME_LAUNCH_CALLERCHECKPOINTS_H

#include "fsdp/Runtime/Checkpoint/Channel.h"
#include "fsdp/Runtime/Checkpoint/CheckpointFolder.h"
#include "fsdp/Runtime/Checkpoint/NativeCheckpoint.h"
#include "fsdp/Runtime/Checkpoint/Progress.h"
#include "fsdp/Runtime/Checkpoint/SaveProtocol.h"
#include "fsdp/Runtime/Launch/Rendezvous.h"
#include "fsdp/Runtime/Position.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::runtime {

/// A box of a tensor of the caller's.
struct CallerTensor {
  std::string name;
  std::vector<int64_t> shape;   ///< of the whole tensor
  std::vector<int64_t> offsets; ///< of the box
  at::Tensor data;              ///< contiguous, on the host; of the box's size
};

/// All ranks call the same methods in the same order, one at a time. Each is a
/// collective: if it throws on one rank, it throws on all. What the rank itself
/// or rank 0 found wrong is an InputError or RunError; otherwise it is an
/// AbortedError with the same message.
class CallerCheckpoints {
public:
  /// A collective.
  explicit CallerCheckpoints(Rendezvous &rendezvous);

  /// Paths are absolute. Saves to `folder`/step-N of `state`, and leaves the
  /// newest `keep` there; 0: all. `own`: as SaveRequest::own. The process holds
  /// the folder until it ends. Throws if the folder has checkpoints that this
  /// run does not continue from; of another folder than the one it continues
  /// from, those of the same run up to this step are its own, too. Returns a
  /// warning, or an empty string.
  std::string save(const std::string &folder, const RunState &state,
                   const std::map<std::string, std::string> &aliases,
                   const std::vector<CallerTensor> &chunks,
                   const std::vector<CallerTensor> &own, int64_t keep);

  /// Opens the checkpoint at `path`: either `path` is one itself, or this takes
  /// the newest valid one in it. Returns false if there is none, or no such
  /// path; throws if the path can only be meant as a checkpoint.
  /// `skipped`, on rank 0: why newer ones were not taken, a line each.
  bool open(const std::string &path, std::vector<std::string> &skipped);
  /// The checkpoint that is open.
  const NativeCheckpoint &opened() const;
  // Not collectives. They throw InputError for a tensor that the checkpoint
  // does not have, or has with another shape or dtype.
  void check(const CallerTensor &tensor) const;
  /// Reads the box to `to.data`.
  void read(const CallerTensor &to) const;
  /// The run continues from the open checkpoint: further ones may be saved to
  /// its folder.
  void goOn();
  /// Closes the checkpoint.
  void close() { chosen.reset(); }

  /// Throws InputError for tensors that no checkpoint can have. Not a
  /// collective.
  static void checkTypes(const std::vector<CallerTensor> &tensors);

private:
  CheckpointFolder &folderAt(const std::string &path);
  /// On rank 0. Throws InputError if the folder has checkpoints of others, or
  /// one of this step.
  void checkFolder(const std::string &path, int64_t step);

  std::unique_ptr<Channel> channel;
  Position position;
  Progress progress;
  /// By path.
  std::map<std::string, std::unique_ptr<CheckpointFolder>> folders;
  /// By path, the last step whose checkpoint there may belong to this run.
  std::map<std::string, int64_t> newest;
  std::string run; ///< RunState::run; empty: not known yet
  std::unique_ptr<NativeCheckpoint> chosen;
  std::string folderOfChosen;
  int64_t lastOfChosen = 0;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_LAUNCH_CALLERCHECKPOINTS_H
