//===- StoreChannel.cpp - a channel over a store of the ranks -------------===//
#include "fsdp/Runtime/Launch/StoreChannel.h"
#include "fsdp/Runtime/Collectives/ProcessIdentity.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Operators/CallTable.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <map>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace fsdp::runtime {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace {

/// A store refuses texts of 8 MiB.
constexpr size_t kPart = size_t(4) << 20;
/// Between two questions for a key, which become rarer.
constexpr milliseconds kShortest{1}, kLongest{20};
/// By which the others wait longer than rank 0.
constexpr milliseconds kLonger{10'000};
/// Between two looks whether a rank that is waited for is alive.
constexpr milliseconds kLook{200};

/// Calls of a store, on a thread of its own: a store whose server is stopped
/// answers no more, and the call could not be ended.
class Caller {
public:
  Caller() : state(std::make_shared<State>()) {
    std::thread([state = state] { state->run(); }).detach();
  }
  Caller(const Caller &) = delete;
  Caller &operator=(const Caller &) = delete;
  ~Caller() {
    std::lock_guard lock(state->mutex);
    state->stops = true;
    state->changed.notify_all();
  }

  /// Whether the call, which keeps alive what it uses, has ended within the
  /// time; `check` is called meanwhile. No further call follows one that has
  /// not.
  template <typename CheckT>
  bool call(std::function<void()> body, milliseconds patience, CheckT check) {
    auto until = steady_clock::now() + patience;
    std::unique_lock lock(state->mutex);
    state->body = std::move(body);
    state->changed.notify_all();
    while (state->body && steady_clock::now() < until) {
      state->changed.wait_for(lock, kLongest);
      lock.unlock();
      check();
      lock.lock();
    }
    return !state->body;
  }

private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::function<void()> body; ///< until it has ended
    bool stops = false;

    void run() {
      std::unique_lock lock(mutex);
      while (!stops) {
        if (body) {
          std::function<void()> own = body;
          lock.unlock();
          own();
          lock.lock();
          body = nullptr;
          changed.notify_all();
        } else {
          changed.wait(lock);
        }
      }
    }
  };
  std::shared_ptr<State> state;
};

/// The process of a rank, if it is on this host.
class Peer {
public:
  explicit Peer(const std::string &identity) {
    size_t blank = identity.rfind(' ');
    if (identity.substr(0, blank) != hostIdentity())
      return;
    pid = pid_t(std::atoi(identity.c_str() + blank + 1));
    fd = int(syscall(SYS_pidfd_open, pid, 0));
    isGone = fd < 0 && errno == ESRCH;
  }
  Peer(const Peer &) = delete;
  Peer &operator=(const Peer &) = delete;
  ~Peer() {
    if (fd >= 0)
      close(fd);
  }

  static std::string ownIdentity() {
    return hostIdentity() + " " + std::to_string(getpid());
  }
  bool hasEnded() const {
    pollfd event{fd, POLLIN, 0};
    return isGone || (fd >= 0 && poll(&event, 1, 0) > 0);
  }
  std::string describe(int64_t rank) const {
    return "rank " + std::to_string(rank) + " (pid " + std::to_string(pid) +
           ") ended during the checkpoint";
  }

private:
  pid_t pid = 0;
  int fd = -1;
  bool isGone = false;
};

class StoreChannel final : public Channel {
public:
  StoreChannel(c10::intrusive_ptr<c10d::Store> store, int64_t rank,
               int64_t worldSize, milliseconds patience,
               std::function<bool()> ended)
      : store(std::move(store)), ownRank(rank), ranks(worldSize),
        patience(patience), ended(std::move(ended)) {
    if (ranks > 1)
      put(nameOf(ownRank), Peer::ownIdentity());
  }

  int64_t rank() const override { return ownRank; }
  int64_t worldSize() const override { return ranks; }

  std::vector<std::string> gather(const std::string &own) override {
    int64_t round = rounds++;
    if (ownRank != 0) {
      put(key(round, ownRank), own);
      return {};
    }
    std::vector<std::string> texts = {own};
    auto until = steady_clock::now() + patience;
    std::vector<int64_t> late;
    for (int64_t other = 1; other < ranks; ++other)
      if (!await(other, round, until))
        late.push_back(other);
    if (!late.empty())
      throw RunError(describe(late) + " within " + seconds(patience));
    for (int64_t other = 1; other < ranks; ++other)
      texts.push_back(take(key(round, other), /*removes=*/true));
    // Who is here has read what was broadcast before.
    for (const std::string &name : std::exchange(given, {}))
      take(name, /*removes=*/true);
    return texts;
  }

  std::string broadcast(const std::string &text) override {
    int64_t round = rounds++;
    if (ranks == 1)
      return text;
    if (ownRank == 0) {
      put(key(round, 0), text);
      given.push_back(key(round, 0));
      return text;
    }
    if (!await(0, round, steady_clock::now() + patience + kLonger))
      throw RunError(describe({0}) + " within " + seconds(patience + kLonger));
    return take(key(round, 0), /*removes=*/false);
  }

  void check() override {
    if (stopped || (ended && ended()))
      throw AbortedError("the run ends");
  }
  void stop() override { stopped = true; }

private:
  static std::string key(int64_t round, int64_t rank) {
    return std::to_string(round) + "/" + std::to_string(rank);
  }
  static std::string seconds(milliseconds time) {
    return std::to_string(time.count() / 1000) + " s";
  }
  static std::string describe(const std::vector<int64_t> &late) {
    std::string text = late.size() == 1 ? "rank " : "ranks ";
    for (size_t i = 0; i < late.size() && i < 8; ++i)
      text += (i ? ", " : "") + std::to_string(late[i]);
    if (late.size() > 8)
      text += " and " + std::to_string(late.size() - 8) + " more";
    return text + " did not come to the checkpoint";
  }

  /// What `call` gives of the store; one that is gone is an error of the run.
  /// The call has copies of all that it uses.
  template <typename CallT>
  auto reach(CallT call) -> decltype(call(std::declval<c10d::Store &>())) {
    using Result = decltype(call(*store));
    struct Outcome {
      std::conditional_t<std::is_void_v<Result>, bool, Result> result{};
      std::string error;
    };
    if (broken)
      throw RunError("the store of the ranks failed to answer earlier");
    auto outcome = std::make_shared<Outcome>();
    bool ended = caller.call(
        [outcome, call, store = store] {
          try {
            if constexpr (std::is_void_v<Result>)
              call(*store);
            else
              outcome->result = call(*store);
          } catch (const c10::Error &error) {
            outcome->error = firstLine(error.what_without_backtrace());
          } catch (const std::exception &error) {
            outcome->error = firstLine(error.what());
          }
        },
        patience + kLonger, [this] { check(); });
    broken = !ended;
    if (broken)
      throw RunError("the store of the ranks, which rank 0 or torchrun "
                     "serves, did not answer within " +
                     seconds(patience + kLonger));
    if (!outcome->error.empty()) {
      check();
      throw RunError("the store of the ranks failed: " + outcome->error);
    }
    if constexpr (!std::is_void_v<Result>)
      return std::move(outcome->result);
  }

  /// The first part says how many there are, and comes last.
  void put(const std::string &name, const std::string &text) {
    size_t parts = std::max<size_t>(1, (text.size() + kPart - 1) / kPart);
    reach([name, text, parts](c10d::Store &store) {
      for (size_t part = parts; part-- > 0;)
        store.set(name + "/" + std::to_string(part),
                  (part ? "" : std::to_string(parts) + "\n") +
                      text.substr(part * kPart, kPart));
    });
  }
  static std::string nameOf(int64_t rank) {
    return "process " + std::to_string(rank);
  }
  bool isThere(const std::string &name) {
    return reach(
        [name](c10d::Store &store) { return store.check({name + "/0"}); });
  }
  /// Whether a rank's text comes. Throws RunError if it cannot.
  bool await(int64_t rank, int64_t round, steady_clock::time_point until) {
    std::string name = key(round, rank);
    auto look = steady_clock::now() + kLook;
    for (milliseconds pause = kShortest; !isThere(name);
         pause = std::min(kLongest, pause * 2)) {
      check();
      if (steady_clock::now() > until)
        return false;
      std::this_thread::sleep_for(pause);
      if (steady_clock::now() < look)
        continue;
      look = steady_clock::now() + kLook;
      // What it did before it ended counts.
      const Peer *peer = find(rank);
      if (peer && peer->hasEnded() && !isThere(name))
        throw RunError(peer->describe(rank));
    }
    return true;
  }
  /// Null as long as it has not said who it is.
  const Peer *find(int64_t rank) {
    std::unique_ptr<Peer> &peer = peers[rank];
    if (!peer && isThere(nameOf(rank)))
      peer = std::make_unique<Peer>(take(nameOf(rank), /*removes=*/false));
    return peer.get();
  }
  std::string take(const std::string &name, bool removes) {
    return reach([name, removes](c10d::Store &store) {
      std::string text = store.get_to_str(name + "/0");
      size_t line = text.find('\n');
      size_t parts = std::stoul(text);
      text.erase(0, line + 1);
      for (size_t part = 1; part < parts; ++part)
        text += store.get_to_str(name + "/" + std::to_string(part));
      for (size_t part = 0; removes && part < parts; ++part)
        store.deleteKey(name + "/" + std::to_string(part));
      return text;
    });
  }

  c10::intrusive_ptr<c10d::Store> store;
  Caller caller;
  int64_t ownRank, ranks;
  milliseconds patience;
  std::function<bool()> ended;
  std::atomic<bool> stopped = false;
  bool broken = false; ///< a call has not ended: none may follow
  std::map<int64_t, std::unique_ptr<Peer>> peers; ///< by rank
  int64_t rounds = 0;
  /// What rank 0 has broadcast since the last gather.
  std::vector<std::string> given;
};

} // namespace

std::unique_ptr<Channel> makeStoreChannel(c10::intrusive_ptr<c10d::Store> store,
                                          int64_t rank, int64_t worldSize,
                                          milliseconds patience,
                                          std::function<bool()> ended) {
  return std::make_unique<StoreChannel>(std::move(store), rank, worldSize,
                                        patience, std::move(ended));
}

} // namespace fsdp::runtime
