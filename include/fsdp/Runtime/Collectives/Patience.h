//===- Patience.h - how long ranks wait for each other --------------------===//
//
// A rank that waits is held up by another one, which may itself be waiting. So
// the clock of a wait measures how long no rank has made progress: it starts
// with the wait, and restarts whenever any rank of the run moves on (Position).
// A first step that warms up, an evaluation or a save is not a hang, however
// long it takes, as long as no part of it takes too long; and the ranks named
// as stragglers are those that do not wait.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_COLLECTIVES_PATIENCE_H
#define FSDP_RUNTIME_COLLECTIVES_PATIENCE_H

#include "fsdp/Runtime/Position.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::runtime {

/// The deadline of a run's waits. Its methods may be called from any thread.
class Patience {
public:
  /// " at step 3, instruction 7: …".
  using Describe = std::function<std::string(const Position &)>;

  /// `longest`: where the milliseconds of the longest step are kept, if other
  /// processes are to see them; it must outlive this object.
  explicit Patience(std::optional<std::chrono::milliseconds> given = {},
                    Describe describe = {},
                    std::atomic<int64_t> *longest = nullptr)
      : given(given), describe(std::move(describe)),
        longest(longest ? longest : &ownLongest) {}
  Patience(const Patience &) = delete;
  Patience &operator=(const Patience &) = delete;

  /// The deadline that was given. The default is five minutes until a step is
  /// done, and then two minutes or 20 times the longest step, whichever is
  /// longer.
  std::chrono::milliseconds deadline() const;
  void stepTook(std::chrono::duration<double> seconds);

  /// Empty if that is not known.
  std::string where(const Position &position) const {
    return describe ? describe(position) : "";
  }

private:
  const std::optional<std::chrono::milliseconds> given;
  const Describe describe;
  std::atomic<int64_t> ownLongest{0};
  std::atomic<int64_t> *const longest;
};

/// How far a rank is, as another one sees it.
struct RankSight {
  int64_t step = -1;
  int64_t instruction = -1;
  uint64_t beats = 0;
  bool saving = false;
  bool waits = false;  ///< whether it waits for other ranks
  bool current = true; ///< false: where it was when it last said so

  /// Whether it has moved on since `before`.
  bool movedSince(const RankSight &before) const {
    return step != before.step || instruction != before.instruction ||
           beats != before.beats || saving != before.saving;
  }
};

/// What a rank sees of all ranks. The methods may be called from any thread and
/// return at once.
class RankSights {
public:
  virtual ~RankSights() = default;

  /// Of every rank, this one included.
  virtual std::vector<RankSight> look() = 0;
  /// What keeps a rank's process from running, such as "is stopped"; empty if
  /// nothing of that kind is known.
  virtual std::string obstacle(int64_t rank) = 0;
  /// The rank's process id if it runs on this host; 0 if it runs elsewhere or
  /// is unknown.
  virtual int32_t process(int64_t rank) = 0;
  /// Why nothing can be seen of the other ranks, and the rank that causes it.
  struct Blindness {
    std::string text;
    std::optional<int64_t> rank = std::nullopt;
  };
  /// nullopt if the others can be seen.
  virtual std::optional<Blindness> blindness() { return std::nullopt; }
  /// Adds to the number of waits that this rank is in.
  virtual void addWaits(int change) = 0;
};

/// How the ranks of a transport wait.
struct WaitSettings {
  std::shared_ptr<const Patience> patience = std::make_shared<Patience>();
  /// What this rank sees of the others; null: what they report through their
  /// store.
  std::shared_ptr<RankSights> sights;
  /// Where others see how far this rank is; null: nowhere.
  const Position *position = nullptr;
  /// The rank that serves the store, if one does.
  std::optional<int64_t> storeServer = std::nullopt;

  /// " at step 3" for this rank; empty if its position is not known.
  std::string step() const;
};

/// While this object lives, this rank counts as waiting.
class WaitCount {
public:
  explicit WaitCount(RankSights &sights) : sights(sights) {
    sights.addWaits(1);
  }
  WaitCount(const WaitCount &) = delete;
  WaitCount &operator=(const WaitCount &) = delete;
  ~WaitCount() { sights.addWaits(-1); }

private:
  RankSights &sights;
};

/// The clock of one wait.
class Stall {
public:
  using Clock = std::chrono::steady_clock;

  /// What holds up the ranks, and for how long nobody has moved.
  struct Cause {
    /// Processes of this host that hold up the others.
    std::vector<int32_t> processes;
    std::string text; ///< "rank 1, which …, has not moved for 9 s …"
  };

  Stall(RankSights &sights, const Patience &patience,
        Clock::time_point now = Clock::now())
      : sights(sights), patience(patience), begun(now), since(now),
        looked(now) {}

  /// To be called periodically, much more often than the deadline and several
  /// times in five seconds. Returns nullopt until the deadline and `grace` have
  /// passed, and while no rank waits (unless `always`). Time in which this
  /// process was suspended does not count, since the others did not run either.
  std::optional<Cause> overdue(std::chrono::milliseconds grace = {},
                               bool always = false,
                               Clock::time_point now = Clock::now());

private:
  Cause cause(std::chrono::milliseconds deadline) const;

  RankSights &sights;
  const Patience &patience;
  const Clock::time_point begun;
  Clock::time_point since;
  Clock::time_point looked; ///< the last time that it was called
  std::vector<RankSight> seen;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_COLLECTIVES_PATIENCE_H
