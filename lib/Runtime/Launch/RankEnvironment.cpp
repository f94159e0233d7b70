//===- RankEnvironment.cpp - what a launcher says to a rank ---------------===//
#include "fsdp/Runtime/Launch/RankEnvironment.h"
#include "fsdp/Runtime/Error.h"

#include <charconv>
#include <cstdint>
#include <cstdlib>

namespace fsdp::runtime {

namespace {

constexpr const char *kLoopback = "127.0.0.1";
/// Below the ports that the kernel gives to programs that do not ask for a
/// specific one.
constexpr uint32_t kFirstPort = 20000, kPorts = 10000;
constexpr int64_t kLastPort = 65535;

struct Launcher {
  const char *rank, *size, *localRank;
  /// Only where this is set, too: a batch script of Slurm has a rank itself.
  const char *needs;
};

constexpr Launcher kTorchrun = {"RANK", "WORLD_SIZE", "LOCAL_RANK", nullptr};
constexpr Launcher kOpenMpi = {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                               "OMPI_COMM_WORLD_LOCAL_RANK", nullptr};
constexpr Launcher kPmi = {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", nullptr};
constexpr Launcher kSlurm = {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID",
                             "SLURM_STEP_ID"};

const char *get(const char *name) { return std::getenv(name); }

bool isSet(const Launcher &launcher) {
  return get(launcher.rank) && (!launcher.needs || get(launcher.needs));
}

std::string variable(const char *name, const Launcher &launcher) {
  if (const char *value = get(name))
    return value;
  throw InputError(std::string(launcher.rank) + " is set but " + name +
                   " is not; start with torchrun, srun or mpirun, or use "
                   "--nproc");
}

int64_t number(const char *name, const Launcher &launcher, int64_t low = 0,
               int64_t high = INT64_MAX) {
  std::string text = variable(name, launcher);
  int64_t value = 0;
  auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size() &&
      value >= low && value <= high)
    return value;
  std::string range = high == INT64_MAX ? ""
                                        : " from " + std::to_string(low) +
                                              " to " + std::to_string(high);
  throw InputError(std::string(name) + ": expected a number" + range +
                   ", got \"" + text.substr(0, 80) + "\"");
}

/// Of launchers neither of which started the other.
void checkSame(const Launcher &one, const Launcher &other) {
  if (!isSet(one) || !isSet(other))
    return;
  for (auto [a, b] : {std::pair(one.rank, other.rank), {one.size, other.size}})
    if (number(a, one) != number(b, other))
      throw InputError(std::string(a) + "=" + get(a) + " and " + b + "=" +
                       get(b) +
                       ": expected equal ranks, or only one of them to be set");
}

/// Whether the launcher says that all ranks are on this host.
bool isOneHost(const RankEnvironment &environment) {
  for (const char *name : {"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"})
    if (const char *value = get(name))
      return std::to_string(environment.worldSize) == value;
  for (const char *name : {"SLURM_STEP_NUM_NODES", "SLURM_NNODES"})
    if (const char *value = get(name))
      return std::string(value) == "1";
  return environment.worldSize == 1;
}

std::string deriveAddress(const RankEnvironment &environment,
                          const Launcher &launcher) {
  if (isOneHost(environment))
    return kLoopback;
  for (const char *name :
       {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"})
    if (const char *value = get(name))
      if (std::string host = firstHost(value); !host.empty())
        return host;
  throw InputError(std::string(launcher.rank) +
                   " is set but MASTER_ADDR is not: expected it to name the "
                   "host of rank 0, as the ranks may be on several");
}

/// Of the job's id, so that two jobs on a host hardly have the same.
int derivePort() {
  std::string job;
  for (const char *name :
       {"SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "PMI_JOBID"})
    if (const char *value = get(name))
      job += std::string(value) + "\n";
  uint32_t hash = 2166136261; // FNV-1a
  for (unsigned char c : job)
    hash = (hash ^ c) * 16777619;
  return int(kFirstPort + hash % kPorts);
}

} // namespace

std::string firstHost(const std::string &hosts) {
  size_t end = hosts.find_first_of("[,");
  std::string host = hosts.substr(0, end);
  if (end == std::string::npos || hosts[end] == ',')
    return host;
  size_t close = hosts.find(']', end);
  if (close == std::string::npos)
    return "";
  host += hosts.substr(end + 1, hosts.find_first_of("-,]", end) - end - 1);
  // What follows the brackets belongs to the name.
  size_t tail = hosts.find_first_of("[,", close);
  if (tail != std::string::npos && hosts[tail] == '[')
    return "";
  return host + hosts.substr(close + 1, tail == std::string::npos
                                            ? tail
                                            : tail - close - 1);
}

std::optional<RankEnvironment> rankEnvironment() {
  const Launcher *found = nullptr;
  for (const Launcher *launcher : {&kTorchrun, &kOpenMpi, &kPmi, &kSlurm})
    if (!found && isSet(*launcher))
      found = launcher;
  if (!found)
    return std::nullopt;
  // torchrun and mpirun may be what srun started.
  if (!get("TORCHELASTIC_RUN_ID"))
    for (const Launcher &other : {kOpenMpi, kPmi, kSlurm})
      checkSame(kTorchrun, other);
  checkSame(kOpenMpi, kPmi);
  RankEnvironment environment;
  environment.sizeVariable = found->size;
  environment.rank = number(found->rank, *found);
  environment.worldSize = number(found->size, *found);
  if (environment.rank >= environment.worldSize)
    throw InputError(std::string(found->rank) + ": expected a rank below " +
                     found->size + "=" + get(found->size) + ", got " +
                     get(found->rank));
  if (get(found->localRank))
    environment.localRank = number(found->localRank, *found);
  if (found == &kTorchrun || get("MASTER_ADDR"))
    environment.masterAddress = variable("MASTER_ADDR", *found);
  else
    environment.masterAddress = deriveAddress(environment, *found);
  if (found == &kTorchrun || get("MASTER_PORT"))
    environment.masterPort = int(number("MASTER_PORT", *found, 1, kLastPort));
  else
    environment.masterPort = derivePort();
  return environment;
}

} // namespace fsdp::runtime
