//===- StoreChannel.cpp - a channel over a store of the ranks -------------===//
#include "fsdp/Runtime/Launch/StoreChannel.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Operators/CallTable.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

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

class StoreChannel final : public Channel {
public:
  StoreChannel(c10::intrusive_ptr<c10d::Store> store, int64_t rank,
               int64_t worldSize, milliseconds patience,
               std::function<bool()> ended)
      : store(std::move(store)), ownRank(rank), ranks(worldSize),
        patience(patience), ended(std::move(ended)) {}

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
      if (!await(key(round, other), until))
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
    if (!await(key(round, 0), steady_clock::now() + patience + kLonger))
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

  /// What `call` gives; a store that is gone is an error of the run.
  template <typename CallT> auto reach(CallT call) -> decltype(call()) {
    try {
      return call();
    } catch (const c10::Error &error) {
      check();
      throw RunError("the store of the ranks failed: " +
                     firstLine(error.what_without_backtrace()));
    }
  }

  /// The first part says how many there are, and comes last.
  void put(const std::string &name, const std::string &text) {
    size_t parts = std::max<size_t>(1, (text.size() + kPart - 1) / kPart);
    reach([&] {
      for (size_t part = parts; part-- > 0;)
        store->set(name + "/" + std::to_string(part),
                   (part ? "" : std::to_string(parts) + "\n") +
                       text.substr(part * kPart, kPart));
    });
  }
  bool await(const std::string &name, steady_clock::time_point until) {
    for (milliseconds pause = kShortest;
         !reach([&] { return store->check({name + "/0"}); });
         pause = std::min(kLongest, pause * 2)) {
      check();
      if (steady_clock::now() > until)
        return false;
      std::this_thread::sleep_for(pause);
    }
    return true;
  }
  std::string take(const std::string &name, bool removes) {
    return reach([&] {
      std::string text = store->get_to_str(name + "/0");
      size_t line = text.find('\n');
      size_t parts = std::stoul(text);
      text.erase(0, line + 1);
      for (size_t part = 1; part < parts; ++part)
        text += store->get_to_str(name + "/" + std::to_string(part));
      for (size_t part = 0; removes && part < parts; ++part)
        store->deleteKey(name + "/" + std::to_string(part));
      return text;
    });
  }

  c10::intrusive_ptr<c10d::Store> store;
  int64_t ownRank, ranks;
  milliseconds patience;
  std::function<bool()> ended;
  std::atomic<bool> stopped = false;
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
