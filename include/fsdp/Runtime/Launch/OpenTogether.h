//===- OpenTogether.h - a checkpoint that all ranks go on from ------------===//
#ifndef FSDP_RUNTIME_LAUNCH_OPENTOGETHER_H
#define FSDP_RUNTIME_LAUNCH_OPENTOGETHER_H

#include "fsdp/Runtime/Checkpoint/Channel.h"
#include "fsdp/Runtime/Checkpoint/CheckpointFolder.h"
#include "fsdp/Runtime/Checkpoint/NativeCheckpoint.h"
#include "fsdp/Runtime/Checkpoint/Progress.h"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::runtime {

// Collectives of the channel.

/// The checkpoint at `path`, of which each rank has compared the hashes of some
/// of the files; null where one of them found it damaged, or another one than
/// rank 0 has, and then `error` says why, the same on all. `step`: what its
/// name says, for who reports where a rank is.
std::unique_ptr<NativeCheckpoint> openTogether(const std::string &path,
                                               int64_t step, Channel &channel,
                                               Progress &progress,
                                               std::string &error);

/// The newest valid one of `steps`, those that rank 0 sees in the folder,
/// ascending; null where there are none. On rank 0 `skipped` hears why a newer
/// one is not it. Those may then be replaced. Throws InputError on rank 0,
/// AbortedError on the others, where there are some and none is valid.
std::unique_ptr<NativeCheckpoint>
openNewestTogether(CheckpointFolder &folder, const std::vector<int64_t> &steps,
                   Channel &channel, Progress &progress,
                   const std::function<void(const std::string &)> &skipped);

/// Throws what rank 0 found as InputError there, AbortedError elsewhere;
/// nothing where it is empty.
void throwOnAll(const Channel &channel, const std::string &error);

/// What the bits of a step depend on beside plan, seed and data.
std::map<std::string, std::string> environmentOfBits(bool isGpu,
                                                     int64_t threads);

/// What differs between two runs, so that bits of later losses may; empty:
/// nothing. Plans are compared where the world size is the same.
std::string compareRuns(const RunState &then, const RunState &now);

/// Throws InputError if `folder`, at `path`, has checkpoints which are not of a
/// run that goes on from `chosen`; null: that begins. `expected`: what to do.
void checkOwn(const CheckpointFolder &folder, const std::string &path,
              const NativeCheckpoint *chosen, const std::string &expected);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_LAUNCH_OPENTOGETHER_H
