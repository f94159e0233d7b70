//===- RankBoard.cpp - what ranks tell each other beside collectives ------===//
//
// Keys: "come/<communicator>/<rank>", "failure" and, for who is late, "asked"
// and the answers "begun/<rank>", one line "<count> <communicator>" for each.
// A rank answers once: who asks is about to fail, and the job with it. "alarm"
// is there when "failure" or "asked" is, so that nothing but it is polled.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Runtime/Collectives/RankBoard.h"
#include "fsdp/Runtime/Error.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <csignal>
#include <exception>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>

namespace fsdp::runtime {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace {

constexpr milliseconds kPoll(100);
/// How much later a failure may be told than its consequences are seen.
constexpr milliseconds kTell(300);
/// Enough for the others to see the question, and to answer it.
constexpr milliseconds kAnswers(1500);

} // namespace

struct RankBoard::State {
  /// A connection of its own: no call of another owner blocks it. Only calls
  /// that return at once are made.
  c10::intrusive_ptr<c10d::Store> store;
  int64_t rank, worldSize;
  /// Whoever served the store has ended, well or not: what matters of that the
  /// collectives say. It is not used again; c10d would log each failure.
  std::atomic<bool> lost = false;

  std::mutex mutex;
  std::condition_variable stopped;
  bool stop = false;
  std::map<std::string, int64_t> begun;
  std::function<void(const std::string &)> onFailure;
  std::function<void()> onTick;
  std::thread thread;

  /// Calls `use` unless the store is lost, or is then.
  template <typename Use> void ifThere(Use use) {
    if (lost)
      return;
    try {
      use();
    } catch (const std::exception &) {
      lost = true;
    }
  }

  std::string readFailure() {
    return store->check({"failure"}) ? store->get_to_str("failure") : "";
  }

  void answer() {
    std::ostringstream text;
    {
      std::lock_guard lock(mutex);
      for (const auto &[communicator, count] : begun)
        text << count << ' ' << communicator << '\n';
    }
    store->set("begun/" + std::to_string(rank), text.str());
  }

  void run() {
    bool answered = false, failed = false;
    std::unique_lock lock(mutex);
    while (!stopped.wait_for(lock, kPoll, [&] { return stop; })) {
      lock.unlock();
      std::string failure;
      ifThere([&] {
        if (!store->check({"alarm"}))
          return;
        if (!answered && store->check({"asked"})) {
          answer();
          answered = true;
        }
        if (!failed)
          failure = readFailure();
      });
      if (!failure.empty()) {
        failed = true;
        onFailure(failure);
      }
      if (onTick)
        onTick();
      lock.lock();
    }
  }
};

void ignoreBrokenPipes() {
  struct sigaction now{};
  if (sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL)
    std::signal(SIGPIPE, SIG_IGN);
}

RankBoard::RankBoard(const c10::intrusive_ptr<c10d::Store> &store, int64_t rank,
                     int64_t worldSize)
    : state(std::make_unique<State>()) {
  ignoreBrokenPipes();
  state->store = store->clone();
  state->rank = rank;
  state->worldSize = worldSize;
}

RankBoard::~RankBoard() {
  {
    std::lock_guard lock(state->mutex);
    state->stop = true;
  }
  state->stopped.notify_all();
  if (state->thread.joinable())
    state->thread.join();
}

int64_t RankBoard::rank() const { return state->rank; }
int64_t RankBoard::worldSize() const { return state->worldSize; }

void RankBoard::watch(std::function<void(const std::string &)> onFailure,
                      std::function<void()> onTick) {
  state->onFailure = std::move(onFailure);
  state->onTick = std::move(onTick);
  state->thread = std::thread([board = state.get()] { board->run(); });
}

void RankBoard::meet(const std::string &communicator, const std::string &name,
                     const std::vector<int64_t> &ranks, milliseconds timeout) {
  auto key = [&](int64_t rank) {
    return "come/" + communicator + "/" + std::to_string(rank);
  };
  std::vector<int64_t> missing = ranks;
  auto end = steady_clock::now() + timeout;
  try {
    state->store->set(key(state->rank), "1");
    for (milliseconds pause(1);; pause = std::min(2 * pause, kPoll)) {
      std::erase_if(missing, [&](int64_t rank) {
        return state->store->check({key(rank)});
      });
      if (missing.empty())
        return;
      if (std::string failure = state->readFailure(); !failure.empty())
        throw AbortedError(failure);
      if (steady_clock::now() > end)
        break;
      std::this_thread::sleep_for(pause);
    }
  } catch (const c10::Error &error) {
    state->lost = true;
    throw RunError("communicator \"" + name + "\": the ranks' store failed: " +
                   error.what_without_backtrace());
  }
  throw RunError("communicator \"" + name + "\": " + nameRanks(missing) +
                 (missing.size() == 1 ? " has" : " have") + " not come in " +
                 std::to_string(timeout.count() / 1000) + " s");
}

void RankBoard::fail(const std::string &message) {
  state->ifThere([&] {
    state->store->compareSet(
        "failure", "", "rank " + std::to_string(state->rank) + ": " + message);
    state->store->set("alarm", "1");
  });
}

std::string RankBoard::failure() {
  std::string failure;
  state->ifThere([&] { failure = state->readFailure(); });
  return failure;
}

std::string RankBoard::awaitFailure() {
  auto end = steady_clock::now() + kTell;
  for (;; std::this_thread::sleep_for(kTell / 10))
    if (std::string text = failure();
        !text.empty() || state->lost || steady_clock::now() > end)
      return text;
}

int64_t RankBoard::begin(const std::string &communicator) {
  std::lock_guard lock(state->mutex);
  return ++state->begun[communicator];
}

std::string RankBoard::describeLate(const std::string &communicator,
                                    int64_t number,
                                    const std::vector<int64_t> &ranks) {
  CollectiveCounts counts = ask(communicator, ranks);
  return state->lost ? "the ranks' store is gone"
                     : describeLateRanks(number, ranks, counts);
}

CollectiveCounts RankBoard::ask(const std::string &communicator,
                                const std::vector<int64_t> &ranks) {
  CollectiveCounts counts;
  {
    std::lock_guard lock(state->mutex);
    counts[state->rank] = state->begun[communicator];
  }
  state->ifThere([&] {
    // Who asks answers too: its thread may be the one that asks.
    state->answer();
    state->store->set("asked", "1");
    state->store->set("alarm", "1");
    auto end = steady_clock::now() + kAnswers;
    while (counts.size() < ranks.size() && state->readFailure().empty() &&
           steady_clock::now() < end) {
      for (int64_t rank : ranks) {
        std::string key = "begun/" + std::to_string(rank);
        if (counts.contains(rank) || !state->store->check({key}))
          continue;
        // A rank that is not yet in the communicator has begun none of it.
        int64_t &count = counts[rank] = 0;
        std::istringstream lines(state->store->get_to_str(key));
        int64_t begun = 0;
        for (std::string name; lines >> begun;) {
          lines.ignore();
          std::getline(lines, name);
          if (name == communicator)
            count = begun;
        }
      }
      std::this_thread::sleep_for(kPoll / 10);
    }
  });
  return counts;
}

} // namespace fsdp::runtime
