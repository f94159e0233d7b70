//===- AgentWatch.cpp - a rank ends when torchrun does --------------------===//
#include "fsdp/Runtime/Launch/AgentWatch.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Files/Files.h"
#include "fsdp/Runtime/Operators/CallTable.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace fsdp::runtime {

namespace {

/// A rank that trains moves on within this.
constexpr int kMovesMs = 500;
/// Enough to see a peer's death and to ask the others (RankBoard).
constexpr int kExplainsMs = 3000;

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

/// torchrun: the nearest ancestor that is not of the rank itself, as a shell
/// between them is. 0 if there is none.
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
  int agentFd = -1, signalFd = -1, stopFd = -1;
  std::thread thread;
  std::mutex mutex;
  const plan::Plan *plan = nullptr;
  const Position *position = nullptr;

  std::pair<int64_t, int64_t> where() {
    std::lock_guard lock(mutex);
    if (!position)
      return {-1, -1};
    return {position->step.load(), position->instruction.load()};
  }

  [[noreturn]] void end(const std::string &cause) {
    std::lock_guard lock(mutex);
    std::string text = "fsdp-run: error: rank " + std::to_string(rank) + ": " +
                       cause +
                       (position ? describePosition(*plan, *position)
                                 : " before the ranks had met") +
                       "\n";
    // One write: a line of this rank alone.
    if (::write(STDERR_FILENO, text.data(), text.size()) < 0)
      _exit(kExitRunFailure);
    _exit(kExitRunFailure);
  }

  /// Whether the rank ended by itself within `milliseconds`.
  bool stopsWithin(int milliseconds) const {
    pollfd stop{stopFd, POLLIN, 0};
    return poll(&stop, 1, milliseconds) > 0;
  }

  void run() {
    pollfd events[] = {
        {stopFd, POLLIN, 0}, {signalFd, POLLIN, 0}, {agentFd, POLLIN, 0}};
    while (poll(events, 3, -1) < 0)
      ;
    if (events[0].revents)
      return;
    if (events[2].revents)
      end("torchrun (pid " + std::to_string(agent) + ") is gone");
    auto before = where();
    if (stopsWithin(kMovesMs) ||
        (where() == before && stopsWithin(kExplainsMs)))
      return;
    end("stopped by TERM");
  }
};

AgentWatch::AgentWatch(int64_t rank) {
  pid_t agent = std::getenv("TORCHELASTIC_RUN_ID") ? findAgent() : 0;
  if (agent <= 0)
    return;
  state = std::make_unique<State>();
  state->rank = rank;
  state->agent = agent;
  state->agentFd = int(syscall(SYS_pidfd_open, agent, 0));
  state->stopFd = eventfd(0, EFD_CLOEXEC);
  sigset_t term;
  sigemptyset(&term);
  sigaddset(&term, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &term, nullptr);
  state->signalFd = signalfd(-1, &term, SFD_CLOEXEC);
  // It may have ended, and its number be another's, before it was opened.
  if (findAgent() != agent)
    state->end("torchrun is gone");
  state->thread = std::thread([watched = state.get()] { watched->run(); });
}

AgentWatch::~AgentWatch() {
  if (!state)
    return;
  eventfd_write(state->stopFd, 1);
  state->thread.join();
  for (int fd : {state->agentFd, state->signalFd, state->stopFd})
    close(fd);
}

void AgentWatch::follow(const plan::Plan *plan, const Position *position) {
  if (!state)
    return;
  std::lock_guard lock(state->mutex);
  state->plan = plan;
  state->position = position;
}

} // namespace fsdp::runtime
