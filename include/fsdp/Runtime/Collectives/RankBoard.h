//===- RankBoard.h - what ranks tell each other beside collectives --------===//
#ifndef FSDP_RUNTIME_COLLECTIVES_RANKBOARD_H
#define FSDP_RUNTIME_COLLECTIVES_RANKBOARD_H

#include "fsdp/Runtime/Collectives/LateRanks.h"
#include "fsdp/Runtime/Collectives/Patience.h"

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace c10d {
class Store;
} // namespace c10d

namespace fsdp::runtime {

/// Lets a write to a peer that is gone fail, instead of killing this process by
/// SIGPIPE, unless that is handled: neither Gloo nor c10d's stores do, as
/// Python ignores it. Called by what opens their sockets.
void ignoreBrokenPipes();

/// Who has come to a communicator, who has failed and how far each rank is,
/// over a store that the ranks of a job share. A thread answers the questions
/// of the others, and asks them how far they are while look() is called. All
/// methods may be called from any thread; those of RankSights do not wait for
/// the store.
class RankBoard : public RankSights {
public:
  /// `store` is new: no key of an earlier job or attempt is in it.
  /// `position`: how far this rank is; null where it does not say. `server`:
  /// the rank that serves the store, if one does.
  RankBoard(const c10::intrusive_ptr<c10d::Store> &store, int64_t rank,
            int64_t worldSize, const Position *position = nullptr,
            std::optional<int64_t> server = std::nullopt);
  /// Ends the thread; `onFailure` is not called any more. A thread that the
  /// store does not answer stays behind.
  ~RankBoard() override;

  int64_t rank() const;
  int64_t worldSize() const;

  /// Calls `onFailure` from the board's thread once a rank has told that it
  /// fails, within about 100 ms, with what failure() returns; `onTick` about
  /// every 100 ms. Once, before any communicator is used.
  void watch(std::function<void(const std::string &)> onFailure,
             std::function<void()> onTick = {});

  /// Waits until all `ranks` have come to `communicator`, a key of this group
  /// alone, called `name` in messages. Throws RunError after `timeout` with
  /// those that have not, AbortedError when a rank has failed.
  void meet(const std::string &communicator, const std::string &name,
            const std::vector<int64_t> &ranks,
            std::chrono::milliseconds timeout);

  /// Tells the others why this rank fails; the first of all ranks is kept.
  void fail(const std::string &message);
  /// "rank 3: …" of a rank that told; empty if none did, or if the store is
  /// gone.
  std::string failure();
  /// The same for an error that may follow from the failure of another rank,
  /// which may tell a little later: waits for that, 300 ms at most.
  std::string awaitFailure();

  std::vector<RankSight> look() override;
  std::string obstacle(int64_t rank) override;
  int32_t process(int64_t rank) override;
  std::optional<Blindness> blindness() override;
  void addWaits(int change) override;

  /// Counts a collective that this rank begins; returns its number, from 1.
  int64_t begin(const std::string &communicator);
  /// Says of the collective that is the number-th, and failed here, which of
  /// `ranks` hold it back: describeLateRanks of what they answer within about
  /// a second, or that the store is gone. Ends early when a rank has failed.
  std::string describeLate(const std::string &communicator, int64_t number,
                           const std::vector<int64_t> &ranks);

private:
  /// Asks how many each of `ranks` has begun, and waits about a second for the
  /// answers.
  CollectiveCounts ask(const std::string &communicator,
                       const std::vector<int64_t> &ranks);

  struct State;
  std::shared_ptr<State> state; ///< the thread's, too
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_COLLECTIVES_RANKBOARD_H
