//===- Torchrun.cpp - ranks that torchrun started -------------------------===//
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Launcher.h"

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <charconv>
#include <cstdlib>
#include <cstring>

#include <unistd.h>

namespace fsdp::runtime {

namespace {

std::string variable(const char *name) {
  const char *value = std::getenv(name);
  if (!value)
    throw InputError(std::string("RANK is set but ") + name +
                     " is not; start with torchrun, or use --nproc");
  return value;
}

int64_t number(const char *name) {
  std::string text = variable(name);
  int64_t value = 0;
  auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0)
    throw InputError(std::string(name) + ": expected a number, got \"" + text +
                     "\"");
  return value;
}

/// A key that no earlier attempt of the same job has written.
std::string keyOfThisAttempt(const std::string &name) {
  const char *restarts = std::getenv("TORCHELASTIC_RESTART_COUNT");
  return "fsdp-run/" + std::string(restarts ? restarts : "0") + "/" + name;
}

c10::intrusive_ptr<c10d::Store>
openStore(const TorchrunEnvironment &environment) {
  c10d::TCPStoreOptions options;
  options.port = uint16_t(environment.masterPort);
  const char *shared = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  bool agentServes = shared && std::strcmp(shared, "True") == 0;
  options.isServer = environment.rank == 0 && !agentServes;
  options.waitWorkers = false;
  options.timeout = std::chrono::seconds(300);
  return c10::make_intrusive<c10d::TCPStore>(environment.masterAddress,
                                             options);
}

void runInSegment(const RunFiles &files, const RunOptions &options,
                  ShmSegment &segment, int64_t rank) {
  std::string prefix = "rank " + std::to_string(rank) + ": ";
  try {
    runRank(files, options, segment, rank);
  } catch (const InputError &error) {
    segment.fail(rank, error.what());
    throw InputError(prefix + error.what());
  } catch (const std::exception &error) {
    segment.fail(rank, error.what());
    throw RunError(prefix + error.what());
  }
}

} // namespace

std::optional<TorchrunEnvironment> torchrunEnvironment() {
  if (!std::getenv("RANK"))
    return std::nullopt;
  TorchrunEnvironment environment;
  environment.rank = number("RANK");
  environment.worldSize = number("WORLD_SIZE");
  if (int64_t local = number("LOCAL_WORLD_SIZE");
      local != environment.worldSize)
    throw InputError("expected all ranks on one host, got WORLD_SIZE=" +
                     std::to_string(environment.worldSize) +
                     " and LOCAL_WORLD_SIZE=" + std::to_string(local));
  environment.masterAddress = variable("MASTER_ADDR");
  environment.masterPort = int(number("MASTER_PORT"));
  return environment;
}

void runUnderTorchrun(const RunOptions &options,
                      const TorchrunEnvironment &environment) {
  int64_t rank = environment.rank;
  RunFiles files(options, /*checkHash=*/rank == 0);
  if (environment.worldSize != files.plan.worldSize)
    throw InputError(
        options.planPath + ": the plan is for world size " +
        std::to_string(files.plan.worldSize) +
        ", got WORLD_SIZE=" + std::to_string(environment.worldSize));
  auto store = openStore(environment);
  std::string key = keyOfThisAttempt("segment");
  std::string attached = keyOfThisAttempt("attached");
  if (rank == 0) {
    ShmSegment segment(files.plan);
    store->set(key, "/proc/" + std::to_string(getpid()) + "/fd/" +
                        std::to_string(segment.fd()));
    runInSegment(files, options, segment, rank);
    // The others reach the segment through this process.
    if (environment.worldSize > 1)
      store->wait({attached});
    return;
  }
  ShmSegment segment(files.plan, store->get_to_str(key));
  if (store->add(attached + "/count", 1) == environment.worldSize - 1)
    store->set(attached, "1");
  runInSegment(files, options, segment, rank);
}

} // namespace fsdp::runtime
