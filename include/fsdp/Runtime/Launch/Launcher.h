//===- Launcher.h - starting and ending the ranks -------------------------===//
#ifndef FSDP_RUNTIME_LAUNCH_LAUNCHER_H
#define FSDP_RUNTIME_LAUNCH_LAUNCHER_H

#include "fsdp/Runtime/Launch/Rendezvous.h"
#include "fsdp/Runtime/Launch/Trainer.h"

#include <cstdint>
#include <optional>

namespace fsdp::runtime {

/// Throws InputError if `ranks` is given and is not the plan's world size, or
/// if this machine cannot hold the plan's ranks.
void checkRanks(const RunFiles &files, const RunOptions &options,
                std::optional<int64_t> ranks);

/// Forks one process per rank and waits for all of them. On the first failure
/// the others are stopped, at the latest after 5 s, and the cause is thrown as
/// RunError. USR1, TERM and INT are handed to the ranks (Requests.h); TERM or
/// INT ends them at once if none has begun its first step, or if it is the
/// second such signal. No rank outlives this process. Call before torch has
/// started threads. `ranks`, if given, must be the plan's world size.
RunEnd runForked(const RunOptions &options, std::optional<int64_t> ranks);

/// Runs as one of the ranks that torchrun, or another launcher, started.
RunEnd runUnderTorchrun(const RunOptions &options,
                        const RankEnvironment &environment);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_LAUNCH_LAUNCHER_H
