//===- Launcher.h - starting and ending the ranks -------------------------===//
#ifndef FSDP_RUNTIME_LAUNCHER_H
#define FSDP_RUNTIME_LAUNCHER_H

#include "fsdp/Runtime/Trainer.h"

#include <cstdint>
#include <optional>

namespace fsdp::runtime {

/// What torchrun says about this process.
struct TorchrunEnvironment {
  int64_t rank = 0;
  int64_t worldSize = 1;
  std::string masterAddress;
  int masterPort = 0;
};

/// Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
/// MASTER_PORT; nullopt if RANK is not set. Throws InputError if some are
/// missing or malformed, or if the ranks are on more than one host.
std::optional<TorchrunEnvironment> torchrunEnvironment();

/// Forks one process per rank and waits for all of them. On the first failure
/// the others are stopped, at the latest after 5 s, and the cause is thrown
/// as RunError. No rank outlives this process. Call before torch has started
/// threads. `ranks`, if given, must be the plan's world size.
void runForked(const RunOptions &options, std::optional<int64_t> ranks);

/// Runs as one of the ranks that torchrun started.
void runUnderTorchrun(const RunOptions &options,
                      const TorchrunEnvironment &environment);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_LAUNCHER_H
