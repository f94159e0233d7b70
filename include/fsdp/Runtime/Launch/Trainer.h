//===- Trainer.h - one rank's run, from load to saved weights -------------===//
#ifndef FSDP_RUNTIME_LAUNCH_TRAINER_H
#define FSDP_RUNTIME_LAUNCH_TRAINER_H

#include "fsdp/Runtime/Checkpoint/Channel.h"
#include "fsdp/Runtime/Collectives/Patience.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Launch/RunFiles.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace fsdp::runtime {

/// What ties a rank to the others of its run.
struct RankLink {
  int64_t rank = 0;
  int64_t localRank = 0; ///< of those on its host
  /// Where others see how far it is.
  Position &position;
  /// Called once, in the rank's process.
  std::function<std::unique_ptr<Comm>(Device &device)> connect = {};
  /// Tells the others why this rank fails, while it is still connected, or as
  /// far as it is connected.
  std::function<void(const std::string &message)> fail = {};
  /// The same for a wait that has passed its deadline. Does not return, since
  /// the other ranks may never return either.
  std::function<void(const PeerHungError &error)> hung = {};
  /// What this rank has been asked for since the last call (Requests.h).
  std::function<uint32_t()> requests = {};
  /// Learns how long steps take.
  std::shared_ptr<Patience> patience = {};
  /// Makes the channel for checkpoints. Called once, after connect.
  std::function<std::unique_ptr<Channel>()> channel = {};
};

/// How a run that does not fail ends: after its last step; or before that
/// because it was asked to, on all ranks after the same step; or at once,
/// because it was asked twice.
enum class RunEnd { Finished, Stopped, StoppedAtOnce };

/// Runs a rank of the plan to the end: loads or initialises its rows of the
/// weights, trains, and on rank 0 writes metrics, progress and weights. Throws.
RunEnd runRank(const RunFiles &files, const RunOptions &options,
               const RankLink &link);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_LAUNCH_TRAINER_H
