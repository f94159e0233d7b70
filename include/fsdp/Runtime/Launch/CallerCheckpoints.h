//===- CallerCheckpoints.h - checkpoints of a caller's own tensors --------===//
//
// The checkpoints of fsdp-run, of a process that has the tensors and the loop
// itself: a step in Python.
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

/// All ranks call the same methods in the same order; one at a time. Each is a
/// collective, which throws on all ranks where it does on one: what the rank
/// itself or rank 0 found wrong as InputError or RunError, else AbortedError
/// with the same words.
class CallerCheckpoints {
public:
  /// A collective.
  explicit CallerCheckpoints(Rendezvous &rendezvous);

  /// Paths are absolute. Saves to `folder`/step-N of `state`, and leaves the
  /// newest `keep` there; 0: all. `own`: as SaveRequest::own. The folder is
  /// this process's until it ends. Throws where it has checkpoints that this
  /// run does not go on from. Returns a warning, or nothing.
  std::string save(const std::string &folder, const RunState &state,
                   const std::map<std::string, std::string> &aliases,
                   const std::vector<CallerTensor> &chunks,
                   const std::vector<CallerTensor> &own, int64_t keep);

  /// Opens the checkpoint at `path`, which is one, or the newest valid one of
  /// those in it; false where it has none, or is not there. `skipped`: why
  /// newer ones are not it, a line each, on rank 0.
  bool open(const std::string &path, std::vector<std::string> &skipped);
  /// Of the one that is open.
  const NativeCheckpoint &opened() const;
  // Of this rank alone; InputError for a tensor that the checkpoint has not, or
  // with another shape or dtype.
  void check(const CallerTensor &tensor) const;
  /// Reads the box to `to.data`.
  void read(const CallerTensor &to) const;
  /// The run goes on from it: further ones may be saved to its folder.
  void goOn();
  /// Lets go of it.
  void close() { chosen.reset(); }

  /// Throws InputError for tensors that no checkpoint has. Of this rank alone.
  static void checkTypes(const std::vector<CallerTensor> &tensors);

private:
  CheckpointFolder &folderAt(const std::string &path);

  std::unique_ptr<Channel> channel;
  Position position;
  Progress progress;
  /// By path.
  std::map<std::string, std::unique_ptr<CheckpointFolder>> folders;
  /// By that, the last step whose checkpoint there may be this run's.
  std::map<std::string, int64_t> newest;
  std::unique_ptr<NativeCheckpoint> chosen;
  std::string folderOfChosen;
  int64_t lastOfChosen = 0;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_LAUNCH_CALLERCHECKPOINTS_H
