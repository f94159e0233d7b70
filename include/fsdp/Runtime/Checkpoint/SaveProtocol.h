//===- SaveProtocol.h - how the ranks save a checkpoint -------------------===//
//
//   1. All agree on step and plan. Rank 0 makes `.inflight.<attempt>`, in a
//      folder with room for all, and tells its name.
//   2. Each writes one file, waits until it is durable, and reports size and
//      hashes. What fails anywhere fails the save: the files are removed, and
//      older checkpoints are as they were.
//   3. Rank 0 writes the manifest, makes it and the folder durable,
//   4. renames the folder to `step-N`, which must not be there, and makes that
//      durable: now it is a checkpoint. It tells the others,
//   5. and removes old checkpoints, by a rename first.
//
// If a run is killed at any point, the old or the new checkpoint is there,
// whole.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_CHECKPOINT_SAVEPROTOCOL_H
#define FSDP_RUNTIME_CHECKPOINT_SAVEPROTOCOL_H

#include "fsdp/Runtime/Checkpoint/Channel.h"
#include "fsdp/Runtime/Checkpoint/CheckpointFolder.h"
#include "fsdp/Runtime/Checkpoint/Manifest.h"
#include "fsdp/Runtime/Checkpoint/Progress.h"
#include "fsdp/Runtime/Checkpoint/ShardFile.h"
#include "fsdp/Runtime/Error.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fsdp::runtime {

/// What one rank has to save. What the tensors borrow must stay until the save
/// has ended.
struct SaveRequest {
  RunState state; ///< equal on all ranks
  std::map<std::string, std::string> aliases;
  /// The chunks that this rank writes.
  std::vector<ShardTensor> chunks;
  /// Whole tensors of which each rank has one of its own. A rank other than 0
  /// writes those that rank 0 has not, or not with the same type and bytes.
  std::vector<ShardTensor> own;
};

/// Why a save failed, on all ranks.
struct SaveError : RunError {
  SaveError(int64_t rank, const std::string &message)
      : RunError(message), rank(rank) {}
  int64_t rank; ///< where
};

struct SaveResult {
  uint64_t bytes = 0;  ///< of all ranks' files
  std::string warning; ///< on rank 0, if an old checkpoint stays; or empty
};

/// A collective of the channel. `keep`: whole checkpoints that stay; 0: all.
/// The folder is open on rank 0. Throws SaveError, or what the channel throws.
SaveResult saveCheckpoint(const SaveRequest &request, CheckpointFolder &folder,
                          int64_t keep, Channel &channel, Progress &progress,
                          size_t pieceBytes = DurableFile::kPiece);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CHECKPOINT_SAVEPROTOCOL_H
