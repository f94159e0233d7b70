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

/// Makes a write to a peer that is gone fail instead of killing this process by
/// SIGPIPE, unless the process handles that signal. Neither Gloo nor c10d's
/// stores do this, since Python ignores SIGPIPE. Called by whatever opens their
/// sockets.
void ignoreBrokenPipes();

/// Who has come to a communicator, who has failed and how far each rank is,
/// over a store that the ranks of a job share. A thread answers the questions
/// of the other ranks, and asks them how far they are for as long as look() is
/// being called. All methods may be called from any thread; those of RankSights
/// do not wait for the store.
class RankBoard : public RankSights {
public:
  /// `store` is new: no key of an earlier job or attempt is in it.
  /// `position`: how far this rank is; null where it does not say. `server`:
  /// the rank that serves the store, if one does.
  RankBoard(const c10::intrusive_ptr<c10d::Store> &store, int64_t rank,
            int64_t worldSize, const Position *position = nullptr,
            std::optional<int64_t> server = std::nullopt);
  /// Ends the thread; `onFailure` is not called any more. If the store does not
  /// answer the thread, the thread is left behind.
  ~RankBoard() override;

  int64_t rank() const;
  int64_t worldSize() const;

  /// Calls `onFailure` from the board's thread, within about 100 ms, once a
  /// rank has reported that it fails, with what failure() returns; calls
  /// `onTick` about every 100 ms. To be called once, before any communicator is
  /// used.
  void watch(std::function<void(const std::string &)> onFailure,
             std::function<void()> onTick = {});

  /// Waits until all `ranks` have come to `communicator`, a key that only this
  /// group uses; messages call it `name`. Throws RunError after `timeout`,
  /// naming the ranks that have not come, and AbortedError when a rank has
  /// failed.
  void meet(const std::string &communicator, const std::string &name,
            const std::vector<int64_t> &ranks,
            std::chrono::milliseconds timeout);

  /// Tells the others why this rank fails; only the first message of all ranks
  /// is kept.
  void fail(const std::string &message);
  /// "rank 3: …", from the rank that reported a failure; empty if none did, or
  /// if the store is gone.
  std::string failure();
  /// The same for an error that another rank's failure may have caused. That
  /// rank may report its failure a little later; this waits for it, 300 ms at
  /// most.
  std::string awaitFailure();

  std::vector<RankSight> look() override;
  std::string obstacle(int64_t rank) override;
  int32_t process(int64_t rank) override;
  std::optional<Blindness> blindness() override;
  void addWaits(int change) override;

  /// Counts a collective that this rank begins; returns its number, from 1.
  int64_t begin(const std::string &communicator);
  /// Says which of `ranks` hold up the number-th collective, which failed here:
  /// describeLateRanks of what they answer within about a second, or that the
  /// store is gone. Returns early when a rank has failed.
  std::string describeLate(const std::string &communicator, int64_t number,
                           const std::vector<int64_t> &ranks);

private:
  /// Asks each of `ranks` how many collectives it has begun, and waits about a
  /// second for the answers.
  CollectiveCounts ask(const std::string &communicator,
                       const std::vector<int64_t> &ranks);

  struct State;
  std::shared_ptr<State> state; ///< the thread's, too
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_COLLECTIVES_RANKBOARD_H
