//===- Torchrun.cpp - ranks that torchrun started -------------------------===//
#include "fsdp/Runtime/Collectives/DeviceComm.h"
#include "fsdp/Runtime/Collectives/ProcessIdentity.h"
#include "fsdp/Runtime/Collectives/ShmComm.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Launch/AgentWatch.h"
#include "fsdp/Runtime/Launch/Launcher.h"
#include "fsdp/Runtime/Operators/CallTable.h"
#include "fsdp/Support/Message.h"

#include <algorithm>
#include <csignal>
#include <cstdio>

#include <unistd.h>

namespace fsdp::runtime {

namespace {

/// Bytes in a millisecond.
constexpr int64_t kSlowDisk = 20'000;

/// Lets the watch follow a rank for as long as its position is there.
class Following {
public:
  Following(AgentWatch &watch, const plan::Plan &plan, const Position &position)
      : watch(watch) {
    watch.follow(&plan, &position);
  }
  Following(const Following &) = delete;
  Following &operator=(const Following &) = delete;
  ~Following() { watch.follow(nullptr, nullptr); }

private:
  AgentWatch &watch;
};

/// Ends the process if another job's ranks may be among those of this one: what
/// they compute together would be meaningless.
void watchPlaces(Rendezvous &rendezvous) {
  rendezvous.watchPlaces([rank = rendezvous.rank()](const std::string &text) {
    std::fprintf(stderr, "fsdp-run: error: rank %lld: %s\n",
                 static_cast<long long>(rank), text.c_str());
    _exit(kExitRunFailure);
  });
}

/// The plan, the weights, the data, and the options that say which collectives
/// there are or which numbers are drawn.
JobParts jobOf(const RunFiles &files, const RunOptions &options) {
  auto fingerprint = [](const auto &files) {
    return files ? files->fingerprint() : "none";
  };
  // checkHashes compares the files themselves with what they must be.
  const std::string &expected = options.weightsPath.empty()
                                    ? files.plan.weights.hash
                                    : options.weightsHash;
  JobParts parts = {
      {"plan", hashOfPlan(files.plan)},
      {"weights", expected.empty() ? fingerprint(files.weights) : expected},
      {"weights of the capture", fingerprint(files.capturedWeights)},
      {"data", fingerprint(files.data)},
      {"data of evaluations", fingerprint(files.evalData)},
      {"--weights-hash", options.weightsHash},
      {"--data-hash", options.dataHash}};
  auto add = [&](const char *name, auto number) {
    parts.emplace_back(name, std::to_string(number));
  };
  add("--seed", options.seed);
  add("--init-seed", options.initSeed.value_or(options.seed));
  add("--comm", int64_t(options.backend));
  add("--steps", options.steps);
  add("--eval-every", options.evalEvery);
  add("--eval-batches", options.evalBatches);
  add("--save-weights", !options.outWeightsPath.empty());
  add("--profile", !options.profilePath.empty());
  add("--trace", !options.tracePath.empty());
  add("--halt-on-nonfinite", options.haltsOnNotFinite);
  add("--checkpoint", !options.checkpointPath.empty());
  add("--checkpoint-every", options.checkpointEvery);
  add("--checkpoint-async", options.checkpointAsync);
  add("whether a checkpoint is found", files.resumes);
  add("--resume",
      int64_t(!options.resume.empty()) + int64_t(options.resume == "auto"));
  return parts;
}

/// Of the ranks that read the same files, the first compares their hashes. What
/// one of them finds ends all. The others wait for it for `meeting` and the
/// time in which a slow disk gives the bytes.
void checkHashes(const RunFiles &files, const RunOptions &options,
                 Rendezvous &rendezvous, AgentWatch &watch,
                 std::chrono::milliseconds meeting) {
  RunFiles::Reading read = files.hashed();
  std::vector<std::string> readers =
      rendezvous.exchange(hostIdentity() + " " + read.identity);
  std::chrono::milliseconds patience =
      meeting + std::chrono::milliseconds(read.bytes / kSlowDisk);
  watch.awaitMeeting(patience);
  auto own = size_t(rendezvous.rank());
  auto first = std::find(readers.begin(), readers.end(), readers[own]);
  std::string error;
  try {
    if (first == readers.begin() + int64_t(own))
      files.checkHashes(options);
  } catch (const InputError &found) {
    error = found.what();
  }
  std::vector<std::string> errors = rendezvous.exchange(error, patience);
  watch.awaitMeeting(meeting);
  if (!error.empty())
    throw InputError(error);
  for (const std::string &other : errors)
    if (!other.empty())
      throw AbortedError(other);
}

std::shared_ptr<Patience> makePatience(const RunFiles &files,
                                       const RunOptions &options) {
  return std::make_shared<Patience>(
      options.deadline, [&plan = files.plan](const Position &position) {
        return describePosition(plan, position);
      });
}

/// Ends this process, whose other threads may wait for a store that hangs, and
/// the processes that hold it up, since torchrun would wait for them.
[[noreturn]] void endHung(int64_t rank, const PeerHungError &error) {
  std::fprintf(stderr, "fsdp-run: error: rank %lld: %s\n",
               static_cast<long long>(rank), oneLine(error.what()).c_str());
  std::fflush(nullptr);
  for (pid_t pid : error.processes)
    kill(pid, SIGKILL);
  _exit(kExitRunFailure);
}

RunEnd runOnOneHost(const RunFiles &files, const RunOptions &options,
                    Rendezvous &rendezvous, AgentWatch &watch) {
  int64_t rank = rendezvous.rank();
  std::unique_ptr<ShmSegment> segment = shareSegment(files.plan, rendezvous);
  watch.met();
  watchPlaces(rendezvous);
  Position &position = segment->state(rank).position;
  Following following(watch, files.plan, position);
  RankLink link{rank, rank, position};
  link.patience = makePatience(files, options);
  link.connect = [&](Device &) {
    auto comm = std::make_unique<ShmComm>(files.plan, *segment, rank,
                                          options.maxStreamDelay.has_value());
    comm->setPatience(link.patience);
    return comm;
  };
  link.fail = [&](const std::string &message) { segment->fail(rank, message); };
  link.hung = [&](const PeerHungError &error) {
    segment->fail(rank, error.what());
    // The others say nothing.
    if (segment->header().failedRank.load() == rank)
      endHung(rank, error);
    throw AbortedError(error.what());
  };
  link.requests = [&watch] { return watch.takeRequests(); };
  link.channel = [&] {
    return makeStoreChannel(
        rendezvous.connectStore(), rank, rendezvous.worldSize(),
        options.checkpointPatience,
        [&] { return segment->header().aborted.load() != 0; });
  };
  return runRank(files, options, link);
}

RunEnd runOnHosts(const RunFiles &files, const RunOptions &options,
                  const RankEnvironment &environment, Rendezvous &rendezvous,
                  AgentWatch &watch) {
  Position position;
  Following following(watch, files.plan, position);
  std::shared_ptr<Transport> transport;
  RankLink link{environment.rank, environment.localRank, position};
  link.patience = makePatience(files, options);
  link.connect = [&](Device &device) {
    transport = makeTransport(
        options.backend, rendezvous.connectStore(), environment.rank,
        environment.worldSize, device,
        {link.patience, nullptr, &position, rendezvous.storeServer()});
    auto comm = std::make_unique<DeviceComm>(files.plan, device, transport);
    rendezvous.confirm();
    watch.met();
    watchPlaces(rendezvous);
    return comm;
  };
  link.fail = [&](const std::string &message) {
    if (transport)
      transport->fail(message);
  };
  link.hung = [&](const PeerHungError &error) {
    transport->fail(error.what());
    endHung(environment.rank, error);
  };
  link.requests = [&watch] { return watch.takeRequests(); };
  link.channel = [&] {
    return makeStoreChannel(
        rendezvous.connectStore(), environment.rank, environment.worldSize,
        options.checkpointPatience,
        [&] { return transport && !transport->failure().empty(); });
  };
  return runRank(files, options, link);
}

} // namespace

RunEnd runUnderTorchrun(const RunOptions &options,
                        const RankEnvironment &environment) {
  int64_t rank = environment.rank;
  AgentWatch watch(rank);
  RunFiles files(options, /*first=*/rank == 0);
  if (environment.worldSize != files.plan.worldSize)
    throw InputError(options.planPath + ": the plan is for world size " +
                     std::to_string(files.plan.worldSize) + ", got " +
                     environment.sizeVariable + "=" +
                     std::to_string(environment.worldSize));
  std::string prefix = "rank " + std::to_string(rank) + ": ";
  std::chrono::milliseconds meeting = options.deadline.value_or(kMeeting);
  watch.awaitMeeting(meeting);
  try {
    Rendezvous rendezvous(environment, jobOf(files, options), meeting);
    checkHashes(files, options, rendezvous, watch, meeting);
    if (options.backend == Backend::Shm)
      return runOnOneHost(files, options, rendezvous, watch);
    return runOnHosts(files, options, environment, rendezvous, watch);
  } catch (const AbortedError &) {
    throw;
  } catch (const InputError &error) {
    throw InputError(prefix + error.what());
  } catch (const std::exception &error) {
    throw RunError(prefix + error.what());
  }
}

} // namespace fsdp::runtime
