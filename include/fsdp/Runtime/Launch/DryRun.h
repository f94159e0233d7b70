//===- DryRun.h - what a run would do -------------------------------------===//
#ifndef FSDP_RUNTIME_LAUNCH_DRYRUN_H
#define FSDP_RUNTIME_LAUNCH_DRYRUN_H

#include "fsdp/Runtime/Launch/RunFiles.h"

#include <cstdint>
#include <optional>

namespace fsdp::runtime {

/// Checks everything that a run with these options would read or write, just as
/// the run would, and prints to stdout what the run would do. Starts no rank
/// and leaves no file behind or changed. `ranks`, if given, must be the plan's
/// world size. Throws what the run would throw, and InputError if a folder
/// lacks room for what is to be written there.
void dryRun(const RunOptions &options, std::optional<int64_t> ranks);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_LAUNCH_DRYRUN_H
