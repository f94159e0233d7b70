//===- Torchrun.cpp - ranks that torchrun started -------------------------===//
#include "fsdp/Runtime/DeviceComm.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Launcher.h"
#include "fsdp/Runtime/ShmComm.h"

namespace fsdp::runtime {

namespace {

void runOnOneHost(const RunFiles &files, const RunOptions &options,
                  Rendezvous &rendezvous) {
  int64_t rank = rendezvous.rank();
  std::unique_ptr<ShmSegment> segment = shareSegment(files.plan, rendezvous);
  RankLink link{rank, rank, segment->state(rank).position, {}, {}};
  link.connect = [&](Device &) {
    return std::make_unique<ShmComm>(files.plan, *segment, rank,
                                     options.maxStreamDelay.has_value());
  };
  link.fail = [&](const std::string &message) { segment->fail(rank, message); };
  runRank(files, options, link);
}

void runOnHosts(const RunFiles &files, const RunOptions &options,
                const TorchrunEnvironment &environment,
                Rendezvous &rendezvous) {
  Position position;
  std::shared_ptr<Transport> transport;
  RankLink link{environment.rank, environment.localRank, position, {}, {}};
  link.connect = [&](Device &device) {
    transport = makeTransport(options.backend, rendezvous.connectStore(),
                              environment.rank, environment.worldSize, device);
    return std::make_unique<DeviceComm>(files.plan, device, transport);
  };
  link.fail = [&](const std::string &message) {
    if (transport)
      transport->fail(message);
  };
  runRank(files, options, link);
}

} // namespace

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
  std::string prefix = "rank " + std::to_string(rank) + ": ";
  try {
    if (options.backend == Backend::Shm)
      runOnOneHost(files, options, rendezvous);
    else
      runOnHosts(files, options, environment, rendezvous);
  } catch (const AbortedError &) {
    throw;
  } catch (const InputError &error) {
    throw InputError(prefix + error.what());
  } catch (const std::exception &error) {
    throw RunError(prefix + error.what());
  }
}

} // namespace fsdp::runtime
