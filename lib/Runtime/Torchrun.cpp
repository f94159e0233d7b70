//===- Torchrun.cpp - ranks that torchrun started -------------------------===//
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Launcher.h"
#include "fsdp/Runtime/ShmComm.h"

namespace fsdp::runtime {

void runUnderTorchrun(const RunOptions &options,
                      const TorchrunEnvironment &environment) {
  int64_t rank = environment.rank;
  RunFiles files(options, /*checkHash=*/rank == 0);
  if (environment.worldSize != files.plan.worldSize)
    throw InputError(
        options.planPath + ": the plan is for world size " +
        std::to_string(files.plan.worldSize) +
        ", got WORLD_SIZE=" + std::to_string(environment.worldSize));
  Rendezvous rendezvous(environment);
  std::unique_ptr<ShmSegment> segment = shareSegment(files.plan, rendezvous);
  std::string prefix = "rank " + std::to_string(rank) + ": ";
  try {
    runRank(files, options,
            {rank, segment->state(rank).position, [&](Device &) {
               return std::make_unique<ShmComm>(
                   files.plan, *segment, rank,
                   options.maxStreamDelay.has_value());
             }});
  } catch (const InputError &error) {
    segment->fail(rank, error.what());
    throw InputError(prefix + error.what());
  } catch (const std::exception &error) {
    segment->fail(rank, error.what());
    throw RunError(prefix + error.what());
  }
}

} // namespace fsdp::runtime
