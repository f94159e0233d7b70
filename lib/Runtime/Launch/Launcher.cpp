//===- Launcher.cpp - forked ranks ----------------------------------------===//
#include "fsdp/Runtime/Launch/Launcher.h"
#include "fsdp/Runtime/Collectives/DeviceComm.h"
#include "fsdp/Runtime/Collectives/SegmentSights.h"
#include "fsdp/Runtime/Collectives/ShmComm.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Launch/LocalStore.h"
#include "fsdp/Runtime/Launch/Requests.h"
#include "fsdp/Runtime/Operators/CallTable.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <sys/prctl.h>
#include <sys/sysinfo.h>
#include <sys/wait.h>
#include <unistd.h>

namespace fsdp::runtime {

namespace {

/// After a failure the other ranks end by themselves within this time; they may
/// not if they wait for a rank that hangs.
constexpr auto kGrace = std::chrono::seconds(5);
/// A TERM within this of another one may be the same, passed on.
constexpr auto kRepeat = std::chrono::seconds(1);
constexpr auto kHungGrace = std::chrono::seconds(1);

sigset_t handledSignals() {
  sigset_t set = askingSignals();
  sigaddset(&set, SIGCHLD);
  return set;
}

/// What the ranks of one host share: always a segment, in which the launcher
/// sees them, and a store where they have memory of their own or checkpoints.
class Ties {
public:
  Ties(const RunFiles &files, const RunOptions &options)
      : plan(files.plan), options(options), shared(files.plan),
        patience(std::make_shared<Patience>(
            options.deadline,
            [this](const Position &position) {
              return describePosition(plan, position);
            },
            &shared.header().longestStep)) {
    if (options.backend != Backend::Shm || options.hasCheckpoints())
      store.emplace(plan.worldSize);
  }

  ShmSegment &segment() { return shared; }
  const Patience &waits() const { return *patience; }

  /// In the process of the rank.
  RankLink link(int64_t rank) {
    RankState &state = shared.state(rank);
    state.pid.store(getpid());
    RankLink link{rank, rank, state.position};
    link.patience = patience;
    link.connect = [this, rank](Device &device) {
      return connect(device, rank);
    };
    link.fail = [this, rank](const std::string &message) {
      shared.fail(rank, message);
      if (transport)
        transport->fail(message);
    };
    link.hung = [this, rank](const PeerHungError &error) {
      shared.header().hung.store(1);
      shared.fail(rank, error.what());
      _exit(kExitRunFailure);
    };
    link.requests = [this, rank] {
      uint32_t pending = takePendingSignals();
      return rank == 0 ? pending | shared.header().requests.exchange(0)
                       : pending;
    };
    link.channel = [this, rank] {
      return makeStoreChannel(
          c10::make_intrusive<c10d::PrefixStore>("checkpoints",
                                                 storeOf(rank)->clone()),
          rank, plan.worldSize, options.checkpointPatience,
          [this] { return shared.header().aborted.load() != 0; });
    };
    return link;
  }
  void leave() {
    // The segment has said why a run fails.
    bool isKnown =
        options.backend == Backend::Shm && shared.header().aborted.load() != 0;
    if (connected)
      store->leave(std::chrono::milliseconds(isKnown ? 0 : 2000));
  }

private:
  std::unique_ptr<Comm> connect(Device &device, int64_t rank) {
    if (options.backend == Backend::Shm) {
      auto comm = std::make_unique<ShmComm>(plan, shared, rank,
                                            options.maxStreamDelay.has_value());
      comm->setPatience(patience);
      return comm;
    }
    auto sights = std::make_shared<SegmentSights>(shared, rank);
    WaitCount counted(*sights);
    transport =
        makeTransport(options.backend, storeOf(rank), rank, plan.worldSize,
                      device, {patience, sights, &shared.state(rank).position});
    return std::make_unique<DeviceComm>(plan, device, transport);
  }

  /// Of this process, which is the rank's.
  const c10::intrusive_ptr<c10d::Store> &storeOf(int64_t rank) {
    if (!connected)
      connected = store->connect(rank, patience->deadline());
    return connected;
  }

  const plan::Plan &plan;
  const RunOptions &options;
  ShmSegment shared;
  std::shared_ptr<Patience> patience;
  std::optional<LocalStore> store;
  c10::intrusive_ptr<c10d::Store> connected;
  /// Of this process.
  std::shared_ptr<Transport> transport;
};

/// The body of a forked rank; does not return.
[[noreturn]] void rankMain(const RunFiles &files, const RunOptions &options,
                           Ties &ties, int64_t rank, pid_t parent,
                           const sigset_t &oldMask) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent)
    _exit(kExitRunFailure);
  // Signals stay pending, in all threads, until they are taken at the end of a
  // step. The parent ends a rank that does not get there.
  sigset_t mask = oldMask, asking = askingSignals();
  sigorset(&mask, &mask, &asking);
  sigprocmask(SIG_SETMASK, &mask, nullptr);
  int status = 0;
  try {
    if (runRank(files, options, ties.link(rank)) == RunEnd::Stopped)
      status = kExitStopped;
  } catch (const AbortedError &) {
    status = kExitRunFailure;
  } catch (const InputError &error) {
    ties.segment().fail(rank, error.what());
    status = kExitBadInput;
  } catch (const std::exception &error) {
    ties.segment().fail(rank, error.what());
    status = kExitRunFailure;
  }
  ties.leave();
  std::fflush(nullptr);
  _exit(status);
}

class Ranks {
public:
  Ranks(const RunFiles &files, Ties &ties)
      : plan(files.plan), ties(ties), segment(ties.segment()),
        sights(segment, /*rank=*/-1), stall(sights, ties.waits()) {}
  Ranks(const Ranks &) = delete;
  Ranks &operator=(const Ranks &) = delete;
  /// Never leaves a process behind, whatever is thrown.
  ~Ranks() {
    killAll();
    for (pid_t pid : pids)
      if (pid > 0)
        waitpid(pid, nullptr, 0);
  }

  void start(const RunFiles &files, const RunOptions &options,
             const sigset_t &oldMask) {
    pid_t parent = getpid();
    std::fflush(nullptr);
    for (int64_t rank = 0; rank < plan.worldSize; ++rank) {
      pid_t pid = fork();
      if (pid == 0)
        rankMain(files, options, ties, rank, parent, oldMask);
      if (pid < 0)
        throw RunError("cannot start rank " + std::to_string(rank) + ": " +
                       std::strerror(errno));
      pids.push_back(pid);
    }
  }

  /// Waits for the ranks; throws the cause if any failed.
  RunEnd join() {
    sigset_t signals = handledSignals();
    while (alive() > 0) {
      reap();
      if (alive() == 0)
        break;
      // A rank that fails may have to wait before it ends.
      if (!failed && segment.header().failedRank.load() >= 0)
        markFailed();
      auto grace = segment.header().hung.load() ? kHungGrace : kGrace;
      if (failed && std::chrono::steady_clock::now() - failedAt > grace)
        killAll();
      if (!failed)
        watchWaits();
      timespec slice{0, 200'000'000};
      int signal = sigtimedwait(&signals, nullptr, &slice);
      if (signal > 0 && requestOf(signal))
        if (std::optional<RunEnd> end = ask(requestOf(signal)))
          return *end;
    }
    if (failed)
      report();
    return stopped ? RunEnd::Stopped : RunEnd::Finished;
  }

private:
  void markFailed() {
    if (!std::exchange(failed, true))
      failedAt = std::chrono::steady_clock::now();
  }

  /// For ranks that cannot tell by themselves that one rank holds them up,
  /// since they wait for a store that it serves; and for ranks that do not
  /// reach the end of the step at which they are to stop. Also for a rank that
  /// is stopped while no other rank waits for it, because it is alone or the
  /// last one.
  void watchWaits() {
    // Nobody waits in it for a save, which may take long.
    std::optional<Stall::Cause> cause =
        stall.overdue(kHungGrace, (asked && !saves()) || isStopped());
    if (!cause)
      return;
    killAll();
    throw RunError(cause->text);
  }

  /// Of the ranks; and ends them where they have nothing to finish, or were
  /// asked before.
  std::optional<RunEnd> ask(uint32_t request) {
    std::string name = nameStop(request);
    if (!(request & kStopRequest)) {
      segment.header().requests |= request;
      return std::nullopt;
    }
    auto now = std::chrono::steady_clock::now();
    bool again = std::exchange(asked, true);
    // Sent to the group, and passed on by a shell: the same. A second ^C is
    // somebody's.
    if (again && (request & kStopByTerm) && now - askedAt < kRepeat)
      return std::nullopt;
    askedAt = now;
    if (again || !begun()) {
      killAll();
      std::fprintf(stderr, "fsdp-run: stopped by %s %s\n", name.c_str(),
                   again ? "at once" : "before the first step");
      return again ? RunEnd::StoppedAtOnce : RunEnd::Stopped;
    }
    segment.header().requests |= request;
    std::fprintf(stderr, "fsdp-run: %s: stops after this step\n", name.c_str());
    return std::nullopt;
  }

  /// Whether a rank writes a checkpoint or weights.
  bool saves() const {
    for (int64_t rank = 0; rank < plan.worldSize; ++rank) {
      const Position &position = segment.state(rank).position;
      if (position.saving.load() ||
          position.savePoint.load() != SavePoint::None)
        return true;
    }
    return false;
  }

  /// Whether a rank is stopped, as by SIGSTOP.
  bool isStopped() {
    for (size_t rank = 0; rank < pids.size(); ++rank)
      if (pids[rank] > 0 && !sights.obstacle(int64_t(rank)).empty())
        return true;
    return false;
  }

  /// Whether a rank has begun its first step.
  bool begun() const {
    for (int64_t rank = 0; rank < plan.worldSize; ++rank)
      if (segment.state(rank).position.step.load() >= 0)
        return true;
    return false;
  }

  int64_t alive() const {
    return std::count_if(pids.begin(), pids.end(),
                         [](pid_t pid) { return pid > 0; });
  }

  void killAll() {
    killed = true;
    for (pid_t pid : pids)
      if (pid > 0)
        kill(pid, SIGKILL);
  }

  void reap() {
    for (size_t rank = 0; rank < pids.size(); ++rank) {
      int status = 0;
      if (pids[rank] <= 0 || waitpid(pids[rank], &status, WNOHANG) <= 0)
        continue;
      pids[rank] = 0;
      if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        continue;
      if (WIFEXITED(status) && WEXITSTATUS(status) == kExitStopped) {
        stopped = true;
        continue;
      }
      markFailed();
      if (WIFEXITED(status))
        worstStatus = std::max(worstStatus, WEXITSTATUS(status));
      if (WIFSIGNALED(status) && !killed && signalCause.empty())
        signalCause = describeDeath(rank, WTERMSIG(status));
      segment.abort();
    }
  }

  std::string describeDeath(size_t rank, int signal) const {
    std::string text = "rank " + std::to_string(rank) +
                       " was killed by signal " + std::to_string(signal) +
                       " (" + strsignal(signal) + ")";
    return text + describePosition(plan, segment.state(int64_t(rank)).position);
  }

  [[noreturn]] void report() const {
    // A death by signal is the cause of the errors that other ranks then
    // report.
    if (!signalCause.empty())
      throw RunError(signalCause);
    int32_t rank = segment.header().failedRank.load();
    std::string cause = rank < 0 ? "a rank ended with exit status " +
                                       std::to_string(worstStatus)
                                 : "rank " + std::to_string(rank) + ": " +
                                       segment.state(rank).failure;
    if (worstStatus == kExitBadInput)
      throw InputError(cause);
    throw RunError(cause);
  }

  const plan::Plan &plan;
  Ties &ties;
  ShmSegment &segment;
  SegmentSights sights;
  Stall stall;
  std::vector<pid_t> pids;
  bool asked = false; ///< to stop
  std::chrono::steady_clock::time_point askedAt;
  bool stopped = false;
  bool failed = false;
  bool killed = false;
  int worstStatus = 0;
  std::chrono::steady_clock::time_point failedAt;
  std::string signalCause;
};

} // namespace

namespace {

/// More than anybody needs, but too few to bring a machine down.
constexpr int64_t kRanksPerCore = 64;

/// Throws InputError for a plan whose ranks this machine cannot hold: more than
/// kRanksPerCore for each core that this process may use, or arenas that are
/// larger together than memory and swap.
void checkMachine(const plan::Plan &plan, const std::string &path) {
  auto fail = [&](const std::string &message) {
    throw InputError(path + ": cannot start " + std::to_string(plan.worldSize) +
                     " ranks on this machine: " + message);
  };
  int64_t cores = std::max(1u, std::thread::hardware_concurrency());
  if (plan.worldSize > kRanksPerCore * cores)
    fail("expected at most " + std::to_string(kRanksPerCore) +
         " for each of its " + std::to_string(cores) + " cores");
  struct sysinfo info{};
  if (!plan.arena || sysinfo(&info) != 0)
    return;
  auto memory = (__int128(info.totalram) + info.totalswap) * info.mem_unit;
  if (__int128(plan.arena->bytes) * plan.worldSize > memory)
    fail("expected arenas that fit in its " + std::to_string(int64_t(memory)) +
         " bytes of memory, got " + std::to_string(plan.arena->bytes) +
         " bytes for each");
}

} // namespace

void checkRanks(const RunFiles &files, const RunOptions &options,
                std::optional<int64_t> ranks) {
  if (ranks && *ranks != files.plan.worldSize)
    throw InputError(options.planPath + ": the plan is for world size " +
                     std::to_string(files.plan.worldSize) + ", got --nproc " +
                     std::to_string(*ranks));
  checkMachine(files.plan, options.planPath);
}

RunEnd runForked(const RunOptions &options, std::optional<int64_t> ranks) {
  RunFiles files(options, /*first=*/true);
  files.checkHashes(options);
  checkRanks(files, options, ranks);
  Ties ties(files, options);

  sigset_t signals = handledSignals();
  sigset_t oldMask;
  sigprocmask(SIG_BLOCK, &signals, &oldMask);
  RunEnd end;
  {
    Ranks running(files, ties);
    running.start(files, options, oldMask);
    end = running.join();
  }
  sigprocmask(SIG_SETMASK, &oldMask, nullptr);
  return end;
}

} // namespace fsdp::runtime
