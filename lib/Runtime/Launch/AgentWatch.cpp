//===- AgentWatch.cpp - what the program that started a rank wants --------===//
#include "fsdp/Runtime/Launch/AgentWatch.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Files/Files.h"
#include "fsdp/Runtime/Launch/Requests.h"
#include "fsdp/Runtime/Operators/CallTable.h"

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace fsdp::runtime {

namespace {

using Clock = std::chrono::steady_clock;

/// Enough to see a peer's death and to ask the others (RankBoard).
constexpr int kExplainsMs = 3000;
/// How often to check whether the ranks have met, and how much longer than the
/// deadline they get to report by themselves which rank has not come.
constexpr int kLookMs = 500;
constexpr auto kMeetingGrace = std::chrono::seconds(3);
/// A signal within this time after another may be the same one, passed on.
constexpr auto kRepeat = std::chrono::seconds(1);

/// Whether process `pid` began with these variables of this one.
bool sharesEnvironment(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/environ",
                     std::ios::binary);
  std::string text;
  int shared = 0;
  for (std::string entry; std::getline(file, entry, '\0');)
    for (std::string name : {"TORCHELASTIC_RUN_ID", "RANK"})
      if (const char *own = std::getenv(name.c_str());
          own && entry == name + "=" + own)
        ++shared;
  return shared == 2;
}

pid_t parentOf(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text);
  // "pid (name) state ppid", and a name may be anything.
  size_t end = text.rfind(')');
  return end == std::string::npos || end + 4 > text.size()
             ? 0
             : pid_t(std::strtol(text.c_str() + end + 4, nullptr, 10));
}

/// The pid of torchrun: the nearest ancestor that does not belong to the rank
/// itself, as a shell between them does. 0 if there is none.
pid_t findAgent() {
  pid_t pid = getppid();
  while (pid > 0 && sharesEnvironment(pid))
    pid = parentOf(pid);
  return pid;
}

} // namespace

struct AgentWatch::State {
  int64_t rank = 0;
  pid_t agent = 0;
  int agentFd = -1, signalFd = -1, stopFd = -1, wakeFd = -1;
  std::thread thread;
  std::mutex mutex;
  const plan::Plan *plan = nullptr;
  const Position *position = nullptr;

  std::atomic<uint32_t> requests = 0;
  std::optional<Clock::time_point> asked; ///< first to stop

  std::optional<Clock::time_point> meeting; ///< guarded by mutex
  int64_t meetingSeconds = 0;

  std::optional<Clock::time_point> meetingBy() {
    std::lock_guard lock(mutex);
    return meeting;
  }

  /// Whether the first step has begun.
  bool begun() {
    std::lock_guard lock(mutex);
    return position && position->step.load() >= 0;
  }

  [[noreturn]] void end(const std::string &cause, int status) {
    std::lock_guard lock(mutex);
    std::string text = "fsdp-run: error: rank " + std::to_string(rank) + ": " +
                       cause +
                       (position ? describePosition(*plan, *position)
                                 : " before the ranks had met") +
                       "\n";
    // One write: a line of this rank alone.
    if (::write(STDERR_FILENO, text.data(), text.size()) < 0)
      _exit(status);
    _exit(status);
  }

  /// Whether the rank ended by itself within `milliseconds`.
  bool stopsWithin(int milliseconds) const {
    pollfd stop{stopFd, POLLIN, 0};
    return poll(&stop, 1, milliseconds) > 0;
  }

  void hear(int signal) {
    uint32_t request = requestOf(signal);
    requests |= request;
    if (!(request & kStopRequest))
      return;
    std::string cause = "stopped by " + nameStop(request);
    Clock::time_point now = Clock::now();
    if (!begun() && !stopsWithin(kExplainsMs) && !begun())
      end(cause, kExitStopped);
    if (!asked)
      asked = Clock::now(); // after the wait
    else if (now - *asked > kRepeat)
      end(cause + " at once", kExitStoppedAtOnce);
  }

  void run() {
    pollfd events[] = {{stopFd, POLLIN, 0},
                       {signalFd, POLLIN, 0},
                       {agentFd, POLLIN, 0},
                       {wakeFd, POLLIN, 0}};
    for (;;) {
      int ready = poll(events, 4, meetingBy() ? kLookMs : -1);
      if (meetingBy() && Clock::now() > *meetingBy())
        end("the ranks have not met in " + std::to_string(meetingSeconds) +
                " s: their store does not answer",
            kExitRunFailure);
      if (ready <= 0)
        continue;
      if (events[0].revents)
        return;
      if (events[2].revents)
        end("torchrun (pid " + std::to_string(agent) + ") is gone",
            kExitRunFailure);
      eventfd_t woken;
      if (events[3].revents)
        eventfd_read(wakeFd, &woken);
      signalfd_siginfo info{};
      if (events[1].revents &&
          read(signalFd, &info, sizeof(info)) == ssize_t(sizeof(info)))
        hear(int(info.ssi_signo));
    }
  }
};

AgentWatch::AgentWatch(int64_t rank) : state(std::make_unique<State>()) {
  state->rank = rank;
  state->stopFd = eventfd(0, EFD_CLOEXEC);
  state->wakeFd = eventfd(0, EFD_CLOEXEC);
  sigset_t signals = askingSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  state->signalFd = signalfd(-1, &signals, SFD_CLOEXEC);
  pid_t agent = std::getenv("TORCHELASTIC_RUN_ID") ? findAgent() : 0;
  if (agent > 0) {
    state->agent = agent;
    state->agentFd = int(syscall(SYS_pidfd_open, agent, 0));
    // It may have ended before it was opened, and its pid may have been reused.
    if (findAgent() != agent)
      state->end("torchrun is gone", kExitRunFailure);
  }
  state->thread = std::thread([watched = state.get()] { watched->run(); });
}

AgentWatch::~AgentWatch() {
  eventfd_write(state->stopFd, 1);
  state->thread.join();
  for (int fd : {state->agentFd, state->signalFd, state->stopFd, state->wakeFd})
    if (fd >= 0)
      close(fd);
}

void AgentWatch::awaitMeeting(std::chrono::milliseconds deadline) {
  {
    std::lock_guard lock(state->mutex);
    state->meeting = Clock::now() + deadline + kMeetingGrace;
    state->meetingSeconds = deadline.count() / 1000;
  }
  eventfd_write(state->wakeFd, 1);
}

void AgentWatch::met() {
  std::lock_guard lock(state->mutex);
  state->meeting.reset();
}

uint32_t AgentWatch::takeRequests() { return state->requests.exchange(0); }

void AgentWatch::follow(const plan::Plan *plan, const Position *position) {
  std::lock_guard lock(state->mutex);
  state->plan = plan;
  state->position = position;
}

} // namespace fsdp::runtime
