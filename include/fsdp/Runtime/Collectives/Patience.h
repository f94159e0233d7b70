//===- Patience.h - how long ranks wait for each other --------------------===//
//
// A rank that waits is late because of another one, which may wait itself. So
// the clock of a wait measures what nobody does: it begins with the wait, and
// anew whenever any rank of the run moves on (Position). A first step that
// warms up, an evaluation or a save are no hang, however long they take, as
// long as their parts are not; and who is named is who does not wait.
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
  /// processes are to see them; it outlives this object.
  explicit Patience(std::optional<std::chrono::milliseconds> given = {},
                    Describe describe = {},
                    std::atomic<int64_t> *longest = nullptr)
      : given(given), describe(std::move(describe)),
        longest(longest ? longest : &ownLongest) {}
  Patience(const Patience &) = delete;
  Patience &operator=(const Patience &) = delete;

  /// What was given. By default five minutes until a step is done, and then
  /// two minutes or 20 times the longest step, whichever is longer.
  std::chrono::milliseconds deadline() const;
  void stepTook(std::chrono::duration<double> seconds);

  /// Empty where nobody can say.
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
  bool waits = false;  ///< for other ranks
  bool current = true; ///< not only where it was when it last said so

  /// Whether it has moved on since `before`.
  bool movedSince(const RankSight &before) const {
    return step != before.step || instruction != before.instruction ||
           beats != before.beats || saving != before.saving;
  }
};

/// What a rank sees of all. Its methods may be called from any thread, and
/// return at once.
class RankSights {
public:
  virtual ~RankSights() = default;

  /// Of every rank, this one included.
  virtual std::vector<RankSight> look() = 0;
  /// What keeps a rank's process from doing anything, "is stopped"; empty if
  /// nothing is known of that kind.
  virtual std::string obstacle(int64_t rank) = 0;
  /// Its process, where that is on this host; 0 elsewhere, or if unknown.
  virtual int32_t process(int64_t rank) = 0;
  /// Why nothing of the others can be seen, and the rank that is why.
  struct Blindness {
    std::string text;
    std::optional<int64_t> rank = std::nullopt;
  };
  /// nullopt if it can.
  virtual std::optional<Blindness> blindness() { return std::nullopt; }
  /// Adds to the number of waits that this rank is in.
  virtual void addWaits(int change) = 0;
};

/// How the ranks of a transport wait.
struct WaitSettings {
  std::shared_ptr<const Patience> patience = std::make_shared<Patience>();
  /// What this rank sees of the others; null: what they say by their store.
  std::shared_ptr<RankSights> sights;
  /// Where others see how far this rank is; null: nowhere.
  const Position *position = nullptr;
  /// The rank that serves the store, if one does.
  std::optional<int64_t> storeServer = std::nullopt;

  /// " at step 3", of this rank; empty where it does not say.
  std::string step() const;
};

/// While it lives, this rank waits.
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

  /// What keeps the ranks, and for how long nobody has moved.
  struct Cause {
    /// Of this host, that hold up the others.
    std::vector<int32_t> processes;
    std::string text; ///< "rank 1, which …, has not moved for 9 s …"
  };

  Stall(RankSights &sights, const Patience &patience,
        Clock::time_point now = Clock::now())
      : sights(sights), patience(patience), begun(now), since(now),
        looked(now) {}

  /// To be called every now and then, often against the deadline and several
  /// times in five seconds: nullopt while that, and `grace`, have not passed,
  /// or nobody waits; with `always` also where nobody does. Time in which this
  /// process did not run, as it was suspended, does not count: nor did others.
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
