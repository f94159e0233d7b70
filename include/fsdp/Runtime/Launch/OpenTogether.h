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

/// The checkpoint at `path`; each rank has compared the hashes of some of its
/// files. Null if a rank found it damaged, or found another checkpoint than
/// rank 0's; `error` then says why, the same on all ranks. `step`: the step in
/// its name, for reports of where a rank is.
std::unique_ptr<NativeCheckpoint> openTogether(const std::string &path,
                                               int64_t step, Channel &channel,
                                               Progress &progress,
                                               std::string &error);

/// The newest valid one of `steps`, those that rank 0 sees in the folder,
/// ascending; null if there are none. On rank 0, `skipped` is told why a newer
/// one is not taken. Those may then be replaced. If there are some and none is
/// valid, throws InputError on rank 0 and AbortedError on the others.
std::unique_ptr<NativeCheckpoint>
openNewestTogether(CheckpointFolder &folder, const std::vector<int64_t> &steps,
                   Channel &channel, Progress &progress,
                   const std::function<void(const std::string &)> &skipped);

/// Throws `error`, which rank 0 found, as InputError there and as AbortedError
/// elsewhere; throws nothing if it is empty.
void throwOnAll(const Channel &channel, const std::string &error);

/// What the bits of a step depend on besides plan, seed and data.
std::map<std::string, std::string> environmentOfBits(bool isGpu,
                                                     int64_t threads);

/// What differs between two runs, so that the bits of later losses may differ;
/// empty: nothing. What one of them does not know is left out. Plans are
/// compared only if the world sizes are equal.
std::string compareRuns(const RunState &then, const RunState &now);

/// Throws InputError if `folder`, at `path`, has checkpoints that do not belong
/// to a run that continues from `chosen` (null: to a run that begins).
/// `expected`: what the user should do instead.
void checkOwn(const CheckpointFolder &folder, const std::string &path,
              const NativeCheckpoint *chosen, const std::string &expected);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_LAUNCH_OPENTOGETHER_H
