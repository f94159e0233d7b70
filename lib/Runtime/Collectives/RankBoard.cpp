//===- RankBoard.cpp - what ranks tell each other beside collectives ------===//
//
// Keys: "come/<communicator>/<rank>", "failure" and, for who is late, "asked"
// and the answers "begun/<rank>", one line "<count> <communicator>" for each.
// A rank answers once: who asks is about to fail, and the job with it. "alarm"
// is there when one of these or "look" is, so that nothing but it is polled.
//
// "look" is a number that grows while ranks want to know how far the others
// are. With each new one that it sees a rank sets "sight/<rank>" to that number
// its RankSight and its process: a rank whose number does not grow does not
// answer. It sets them now and then besides, so that others know where it was
// last.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Runtime/Collectives/RankBoard.h"
#include "fsdp/Runtime/Collectives/ProcessIdentity.h"
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
#include <utility>

#include <unistd.h>

namespace fsdp::runtime {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace {

constexpr milliseconds kPoll(100);
/// How long after its consequences are seen a failure may be reported.
constexpr milliseconds kTell(300);
/// Enough for the others to see the question, and to answer it.
constexpr milliseconds kAnswers(1500);
/// How often a rank reports its position unasked, and how often it looks (both
/// less often the more ranks there are), and for how long it keeps looking
/// after that was wanted.
constexpr milliseconds kShow(200), kShowOfRank(10);
constexpr milliseconds kLook(300), kLookOfRank(2), kLookOn(1000);
/// A live thread, or a live store, answers within this time.
constexpr milliseconds kSilence(1000);

} // namespace

struct RankBoard::State {
  /// A connection of its own: no call of another owner blocks it. Only calls
  /// that return at once are made.
  c10::intrusive_ptr<c10d::Store> store;
  int64_t rank, worldSize;
  const Position *position = nullptr; ///< guarded by mutex
  std::optional<int64_t> server;
  std::atomic<int> waits = 0;
  /// Whoever served the store has ended, normally or not; the collectives
  /// report whatever matters of that. The store is not used again, as c10d
  /// would log each failure.
  std::atomic<bool> lost = false;

  std::mutex mutex;
  std::condition_variable stopped;
  bool stop = false;
  bool calling = false; ///< the functions below
  bool ended = false;   ///< the thread
  std::map<std::string, int64_t> begun;
  std::function<void(const std::string &)> onFailure;
  std::function<void()> onTick;
  std::thread thread;

  struct Sight {
    RankSight sight;
    int64_t number = -1;
    int32_t pid = 0;
    std::string identity;
    std::string text; ///< of all that
    steady_clock::time_point heard;
  };
  // Guarded by mutex.
  std::vector<Sight> seen;
  steady_clock::time_point wanted, lastLook;
  /// When the store answered, and from when it has been wanted without a break.
  steady_clock::time_point answered, wantedSince;
  /// The number of the first look since then; -1 before that.
  int64_t firstLook = -1;
  // The thread's.
  int64_t shown = 0, shownStep = -1;
  steady_clock::time_point lastShown;

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

  RankSight ownSight() {
    std::lock_guard lock(mutex);
    RankSight sight;
    if (position)
      sight = {position->step.load(), position->instruction.load(),
               position->beats.load(), position->saving.load()};
    sight.waits = waits > 0;
    return sight;
  }

  /// As an answer to the number-th look.
  void show(int64_t number) {
    shown = number;
    lastShown = steady_clock::now();
    RankSight own = ownSight();
    shownStep = own.step;
    std::ostringstream text;
    text << number << ' ' << own.step << ' ' << own.instruction << ' '
         << own.beats << ' ' << own.saving << ' ' << own.waits << ' '
         << getpid() << ' ' << processIdentity(getpid());
    store->set("sight/" + std::to_string(rank), text.str());
  }

  void lookAtOthers() {
    int64_t number = store->add("look", 1);
    store->set("alarm", "1");
    {
      std::lock_guard lock(mutex);
      if (firstLook < 0)
        firstLook = number;
    }
    for (int64_t r = 0; r < worldSize; ++r)
      lookAt(r);
  }

  void lookAt(int64_t r) {
    std::string key = "sight/" + std::to_string(r);
    if (r == rank || !store->check({key}))
      return;
    Sight sight;
    sight.text = store->get_to_str(key);
    std::istringstream text(sight.text);
    text >> sight.number >> sight.sight.step >> sight.sight.instruction >>
        sight.sight.beats >> sight.sight.saving >> sight.sight.waits >>
        sight.pid >> std::ws;
    std::getline(text, sight.identity);
    std::lock_guard lock(mutex);
    Sight &before = seen[size_t(r)];
    if (sight.text == before.text)
      return;
    // What it said before it was asked is no sign of life.
    bool answers = firstLook >= 0 && sight.number >= firstLook;
    sight.heard = answers ? steady_clock::now() : before.heard;
    before = sight;
  }

  bool isTimeToShow() {
    return steady_clock::now() - lastShown > kShow + worldSize * kShowOfRank &&
           ownSight().step != shownStep;
  }

  bool isTimeToLook() {
    std::lock_guard lock(mutex);
    auto now = steady_clock::now();
    if (now - wanted > kLookOn ||
        now - lastLook < kLook + worldSize * kLookOfRank)
      return false;
    lastLook = now;
    return true;
  }

  void run() {
    bool hasAnswered = false, failed = false;
    // A rank that is stopped before anybody looks has said where it is.
    ifThere([&] { show(0); });
    std::unique_lock lock(mutex);
    while (!stopped.wait_for(lock, kPoll, [&] { return stop; })) {
      lock.unlock();
      std::string failure;
      ifThere([&] {
        if (isTimeToShow())
          show(shown);
        if (isTimeToLook())
          lookAtOthers();
        bool alarm = store->check({"alarm"});
        {
          std::lock_guard answering(mutex);
          answered = steady_clock::now();
        }
        if (!alarm)
          return;
        if (!hasAnswered && store->check({"asked"})) {
          answer();
          hasAnswered = true;
        }
        if (store->check({"look"}))
          if (int64_t number = store->add("look", 0); number != shown)
            show(number);
        if (!failed)
          failure = readFailure();
      });
      lock.lock();
      // Who left this thread behind is gone.
      if (stop)
        break;
      calling = true;
      lock.unlock();
      if (!failure.empty()) {
        failed = true;
        onFailure(failure);
      }
      if (onTick)
        onTick();
      lock.lock();
      calling = false;
    }
    ended = true;
    stopped.notify_all();
  }
};

void ignoreBrokenPipes() {
  struct sigaction now{};
  if (sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL)
    std::signal(SIGPIPE, SIG_IGN);
}

RankBoard::RankBoard(const c10::intrusive_ptr<c10d::Store> &store, int64_t rank,
                     int64_t worldSize, const Position *position,
                     std::optional<int64_t> server)
    : state(std::make_shared<State>()) {
  ignoreBrokenPipes();
  state->store = store->clone();
  state->rank = rank;
  state->worldSize = worldSize;
  state->position = position;
  state->server = server;
  state->seen.resize(size_t(worldSize));
}

RankBoard::~RankBoard() {
  std::unique_lock lock(state->mutex);
  state->stop = true;
  state->position = nullptr;
  state->stopped.notify_all();
  if (!state->thread.joinable())
    return;
  bool ended =
      state->stopped.wait_for(lock, kSilence, [&] { return state->ended; }) ||
      state->calling;
  lock.unlock();
  if (ended)
    state->thread.join();
  else
    state->thread.detach();
}

std::vector<RankSight> RankBoard::look() {
  RankSight own = state->ownSight();
  std::lock_guard lock(state->mutex);
  auto now = steady_clock::now();
  if (now - state->wanted > kLookOn) {
    state->wantedSince = now;
    state->firstLook = -1;
  }
  state->wanted = now;
  std::vector<RankSight> sights;
  for (const State::Sight &other : state->seen) {
    sights.push_back(other.sight);
    sights.back().current = now - other.heard <= kSilence;
  }
  sights[size_t(state->rank)] = own;
  return sights;
}

std::string RankBoard::obstacle(int64_t rank) {
  std::lock_guard lock(state->mutex);
  auto heard = std::max(state->seen[size_t(rank)].heard, state->wantedSince);
  bool silent = rank != state->rank && steady_clock::now() - heard > kSilence;
  return silent ? "does not answer" : "";
}

std::optional<RankSights::Blindness> RankBoard::blindness() {
  std::lock_guard lock(state->mutex);
  auto heard = std::max(state->answered, state->wantedSince);
  if (!state->lost && steady_clock::now() - heard <= kSilence)
    return std::nullopt;
  // Nobody must wait for it again.
  state->lost = true;
  if (!state->server)
    return Blindness{"the ranks' store does not answer"};
  return Blindness{"rank " + std::to_string(*state->server) +
                       ", which serves the ranks' store, does not answer",
                   state->server};
}

int32_t RankBoard::process(int64_t rank) {
  std::lock_guard lock(state->mutex);
  const State::Sight &other = state->seen[size_t(rank)];
  bool isHere = other.pid > 0 && processIdentity(other.pid) == other.identity;
  return isHere ? other.pid : 0;
}

void RankBoard::addWaits(int change) { state->waits += change; }

int64_t RankBoard::rank() const { return state->rank; }
int64_t RankBoard::worldSize() const { return state->worldSize; }

void RankBoard::watch(std::function<void(const std::string &)> onFailure,
                      std::function<void()> onTick) {
  state->onFailure = std::move(onFailure);
  state->onTick = std::move(onTick);
  state->thread = std::thread([board = state] { board->run(); });
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
      if (missing.empty()) {
        // Later this rank may not be able to say who it is.
        if (state->server)
          state->lookAt(*state->server);
        return;
      }
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
    // A rank that asks must answer, too: its own thread may be the one that
    // asks.
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
