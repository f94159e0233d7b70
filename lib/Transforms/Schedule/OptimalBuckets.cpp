//===- OptimalBuckets.cpp - which neighbours to gather together -----------===//
#include "OptimalBuckets.h"

#include <algorithm>
#include <array>
#include <tuple>

using namespace mlir::fsdp;

namespace {

/// Items first to last, as one.
struct Bucket {
  bool inForward = false, inBackward = false;
  double gatherBytes = 0, reduceBytes = 0;
  int64_t gathered = 0, gradient = 0;
  double forwardUse = std::numeric_limits<double>::infinity();
  double forwardEnd = 0;
  double backwardUse = std::numeric_limits<double>::infinity();
  double reduceBegin = 0;
  int64_t forwardPeak = 0, backwardPeak = 0;

  void add(const BucketItem &item) {
    inForward |= item.inForward;
    inBackward |= item.inBackward;
    gatherBytes += item.gatherBytes;
    reduceBytes += item.reduceBytes;
    gathered += item.gathered;
    gradient += item.gradient;
    if (item.inForward) {
      forwardUse = std::min(forwardUse, item.forwardUse);
      forwardEnd = std::max(forwardEnd, item.forwardEnd);
    }
    if (item.inBackward)
      backwardUse = std::min(backwardUse, item.backwardUse);
    if (item.reduceBytes > 0)
      reduceBegin = std::max(reduceBegin, item.reduceBegin);
    forwardPeak = std::max(forwardPeak, item.forwardPeak);
    backwardPeak = std::max(backwardPeak, item.backwardPeak);
  }
};

/// What a partition of the first items means for the rest: forward up to them,
/// and backward from them on. Less is better in every number. A lag stands for
/// the latest end of a transfer: the seconds by which the step gets longer,
/// minus the time at which the transfer begins.
struct State {
  double wait = 0;       ///< of compute, in forward
  double linkFree = 0;   ///< in forward, without the waits
  double late = 0;       ///< the step, from the last bucket's gradients on
  double lateBefore = 0; ///< from the earliest gather of backward on
  double gatherLag = 0, reduceLag = 0;
  double work = 0;    ///< of the link in backward
  double allWork = 0; ///< of it, and in forward
  /// late - reduceBegin of the last buckets with gradients, the last first.
  std::array<double, kMostReducesInFlight> due = {};
  int64_t peak = 0;
  int64_t next = 0;         ///< gathered bytes of the last bucket, in backward
  int64_t forwardBytes = 0; ///< alive at the last bucket, in forward
  /// Alive at a bucket in backward but for gradients of so many buckets before
  /// it in time, less one.
  std::array<int64_t, kMostReducesInFlight> backwardBytes = {};

  /// Which transition made it.
  int32_t begin = 0;
  int32_t from = -1;

  double exposed() const { return wait + std::max({0.0, late, lateBefore}); }
};

/// How close states must be to count as one.
struct Tolerance {
  double seconds = 0;
  double bytes = 0;
  Tolerance operator*(double factor) const {
    return {seconds * factor, bytes * factor};
  }
};

/// No worse in any number by more than the tolerance.
bool isWithin(const State &a, const State &b, Tolerance tolerance) {
  double seconds = tolerance.seconds;
  auto bytes = int64_t(tolerance.bytes);
  if (a.wait > b.wait + seconds || a.late > b.late + seconds ||
      a.lateBefore > b.lateBefore + seconds || a.peak > b.peak + bytes ||
      a.work > b.work + seconds || a.allWork > b.allWork + seconds ||
      a.linkFree > b.linkFree + seconds ||
      a.gatherLag > b.gatherLag + seconds ||
      a.reduceLag > b.reduceLag + seconds || a.next > b.next + bytes ||
      a.forwardBytes > b.forwardBytes + bytes)
    return false;
  for (size_t k = 0; k < a.due.size(); ++k)
    if (a.due[k] > b.due[k] + seconds ||
        a.backwardBytes[k] > b.backwardBytes[k] + bytes)
      return false;
  return true;
}

class Model {
public:
  explicit Model(const BucketProblem &problem)
      : problem(problem), inFlight(size_t(std::clamp(problem.reducesInFlight, 1,
                                                     kMostReducesInFlight))) {}

  State start() const {
    State state;
    state.gatherLag = state.reduceLag = -problem.end;
    state.due.fill(-problem.end);
    state.peak = problem.otherPeak;
    return state;
  }

  State add(State state, const Bucket &bucket) const {
    if (bucket.inForward)
      gatherInForward(state, bucket);
    if (bucket.reduceBytes > 0)
      reduce(state, bucket);
    if (bucket.inBackward)
      gatherInBackward(state, bucket);
    occupy(state, bucket);
    return state;
  }

  BucketPartition finish(const State &state) const {
    double begin = problem.backwardBegin;
    BucketPartition result;
    double waits = std::max(state.exposed(),
                            state.wait + state.work - (problem.end - begin));
    result.exposed = waits + problem.slowdown * state.allWork;
    result.peak = std::max(state.peak, state.forwardBytes);
    for (int64_t bytes : state.backwardBytes)
      result.peak = std::max(result.peak, bytes);
    return result;
  }

private:
  void gatherInForward(State &state, const Bucket &bucket) const {
    double seconds = problem.gather.of(bucket.gatherBytes);
    double end = state.linkFree + seconds;
    state.allWork += seconds;
    state.wait += std::max(0.0, end - bucket.forwardUse);
    state.linkFree = std::min(end, bucket.forwardUse);
  }

  void reduce(State &state, const Bucket &bucket) const {
    double seconds = problem.reduce.of(bucket.reduceBytes);
    state.reduceLag =
        std::max(state.reduceLag, state.due[inFlight - 1]) + seconds;
    state.late = std::max(state.late, bucket.reduceBegin + state.reduceLag);
    state.work += seconds;
    state.allWork += seconds;
    std::shift_right(state.due.begin(), state.due.end(), 1);
    state.due[0] = state.late - bucket.reduceBegin;
  }

  void gatherInBackward(State &state, const Bucket &bucket) const {
    double seconds = problem.again.of(bucket.gatherBytes);
    state.gatherLag =
        std::max(state.gatherLag, state.late - bucket.backwardUse) + seconds;
    state.lateBefore =
        std::max(state.lateBefore, bucket.forwardEnd + state.gatherLag);
    state.work += seconds;
    state.allWork += seconds;
  }

  void occupy(State &state, const Bucket &bucket) const {
    int64_t gathered = bucket.inForward ? bucket.gathered : 0;
    state.peak = std::max(state.peak, state.forwardBytes + gathered);
    state.forwardBytes = bucket.forwardPeak + gathered;

    int64_t again = bucket.inBackward ? bucket.gathered : 0;
    auto &alive = state.backwardBytes;
    if (bucket.reduceBytes > 0) {
      for (int64_t &bytes : alive)
        bytes += bytes > 0 ? bucket.gradient : 0;
      state.peak = std::max(state.peak, alive[0]);
      std::shift_left(alive.begin(), alive.end(), 1);
      alive.back() = 0;
    }
    int64_t &own = alive[inFlight - 1];
    own = std::max(own,
                   bucket.backwardPeak + again + state.next + bucket.gradient);
    state.next = again;
  }

  const BucketProblem &problem;
  size_t inFlight;
};

/// Keeps the states that no other beats, and one of those within the tolerance.
/// If more than kMostStates remain and the tolerance is not 0, it is doubled;
/// returns the tolerance that was enough.
Tolerance prune(std::vector<State> &states, Tolerance tolerance, double scale) {
  auto sum = [&](const State &s) {
    double time = s.wait + s.linkFree + s.late + s.lateBefore + s.work +
                  s.allWork + s.gatherLag + s.reduceLag;
    int64_t memory = s.peak + s.next + s.forwardBytes;
    for (size_t k = 0; k < s.due.size(); ++k) {
      time += s.due[k];
      memory += s.backwardBytes[k];
    }
    return time + scale * double(memory);
  };
  std::vector<std::pair<double, int32_t>> order;
  for (size_t i = 0; i < states.size(); ++i)
    order.push_back({sum(states[i]), int32_t(i)});
  std::sort(order.begin(), order.end());
  bool isExact = tolerance.seconds == 0;
  for (;; tolerance = tolerance * 2) {
    std::vector<State> kept;
    for (auto [key, index] : order) {
      const State &state = states[size_t(index)];
      if (std::none_of(kept.begin(), kept.end(), [&](const State &other) {
            return isWithin(other, state, tolerance);
          }))
        kept.push_back(state);
      if (!isExact && kept.size() > kMostStates)
        break;
    }
    if (isExact || kept.size() <= kMostStates) {
      states = std::move(kept);
      return tolerance;
    }
  }
}

/// Those that no other beats in both, the fastest first.
std::vector<BucketPartition> frontOf(std::vector<BucketPartition> all) {
  std::sort(all.begin(), all.end(),
            [](const BucketPartition &a, const BucketPartition &b) {
              return std::tuple(a.exposed, a.peak, a.begins.size()) <
                     std::tuple(b.exposed, b.peak, b.begins.size());
            });
  std::vector<BucketPartition> front;
  for (BucketPartition &partition : all)
    if (front.empty() || partition.peak < front.back().peak)
      front.push_back(std::move(partition));
  return front;
}

int64_t largestPeak(const BucketProblem &problem) {
  int64_t bytes = problem.otherPeak;
  for (const BucketItem &item : problem.items)
    bytes += item.gathered + item.gradient;
  return bytes;
}

bool areAlike(const BucketItem &a, const BucketItem &b) {
  auto key = [](const BucketItem &item) {
    return std::tuple(item.kind, item.inForward, item.inBackward,
                      item.gatherBytes, item.reduceBytes, item.gathered,
                      item.gradient);
  };
  return key(a) == key(b);
}

/// The problem without the blocks between the first and the last half of
/// kSolvedBlocks.
BucketProblem shorten(const BucketProblem &problem, const Repetition &blocks) {
  int32_t half = kSolvedBlocks / 2;
  size_t from = size_t(blocks.begin + half * blocks.length);
  size_t to = size_t(blocks.begin + (blocks.count - half) * blocks.length);
  const BucketItem &first = problem.items[from], &after = problem.items[to];
  double forward = after.forwardUse - first.forwardUse;
  // In backward `after` comes first.
  double backward = first.reduceBegin - after.reduceBegin;
  BucketProblem result = problem;
  result.items.erase(result.items.begin() + std::ptrdiff_t(from),
                     result.items.begin() + std::ptrdiff_t(to));
  for (size_t i = 0; i < result.items.size(); ++i) {
    BucketItem &item = result.items[i];
    if (i >= from) {
      item.forwardUse -= forward;
      item.forwardEnd -= forward;
    }
    double less = forward + (i < from ? backward : 0);
    item.backwardUse -= less;
    item.reduceBegin -= less;
  }
  result.backwardBegin -= forward;
  result.end -= forward + backward;
  return result;
}

/// The buckets of the whole list from those of the shortened one: between two
/// cuts at the same place of two blocks, the buckets are repeated.
std::vector<int32_t> repeatBuckets(const std::vector<int32_t> &begins,
                                   const Repetition &blocks) {
  auto isCut = [&](int32_t item) {
    return std::binary_search(begins.begin(), begins.end(), item);
  };
  int32_t length = blocks.length, middle = kSolvedBlocks / 2;
  int32_t from = blocks.begin + middle * length, period = length;
  bool found = false;
  for (int32_t wide = 1; wide < kSolvedBlocks && !found; ++wide)
    for (int32_t shift = 0; shift < length * (kSolvedBlocks - wide) && !found;
         ++shift) {
      // Those around the middle first.
      int32_t center = blocks.begin + (kSolvedBlocks - wide) * length / 2;
      int32_t cut = center + (shift % 2 ? -1 : 1) * ((shift + 1) / 2);
      if (cut < blocks.begin ||
          cut + wide * length > blocks.begin + kSolvedBlocks * length ||
          !isCut(cut) || !isCut(cut + wide * length))
        continue;
      from = cut;
      period = wide * length;
      found = true;
    }
  int32_t more = (blocks.count - kSolvedBlocks) * length;
  std::vector<int32_t> result;
  for (int32_t begin : begins)
    if (begin < from)
      result.push_back(begin);
  result.push_back(from);
  for (int32_t done = 0; done < more; done += period) {
    for (int32_t begin : begins)
      if (found && begin > from && begin < from + period &&
          begin - from + done < more)
        result.push_back(begin + done);
    result.push_back(from + std::min(done + period, more));
  }
  for (int32_t begin : begins)
    if (begin > from)
      result.push_back(begin + more);
  return result;
}

} // namespace

BucketPartition mlir::fsdp::evaluateBuckets(const BucketProblem &problem,
                                            std::vector<int32_t> begins) {
  Model model(problem);
  State state = model.start();
  for (size_t b = 0; b < begins.size(); ++b) {
    Bucket bucket;
    size_t end =
        b + 1 < begins.size() ? size_t(begins[b + 1]) : problem.items.size();
    for (size_t i = size_t(begins[b]); i < end; ++i)
      bucket.add(problem.items[i]);
    state = model.add(state, bucket);
  }
  BucketPartition result = model.finish(state);
  result.begins = std::move(begins);
  return result;
}

std::vector<BucketPartition>
mlir::fsdp::findBuckets(const BucketProblem &problem, double epsilon) {
  const auto &items = problem.items;
  size_t count = items.size();
  if (count == 0)
    return {evaluateBuckets(problem, {})};
  Model model(problem);
  auto largest = double(largestPeak(problem));
  Tolerance each = Tolerance{problem.end, largest} * (epsilon / double(count));
  Tolerance used = each;
  double scale = largest > 0 ? problem.end / largest : 0;
  std::vector<std::vector<State>> fronts(count + 1);
  fronts[0] = {model.start()};
  for (size_t end = 1; end <= count; ++end) {
    Bucket bucket;
    for (size_t begin = end; begin-- > 0;) {
      bucket.add(items[begin]);
      if (begin + 1 < end && (items[begin].kind != items[end - 1].kind ||
                              bucket.gatherBytes > problem.mostBytes))
        break;
      for (size_t from = 0; from < fronts[begin].size(); ++from) {
        State state = model.add(fronts[begin][from], bucket);
        state.begin = int32_t(begin);
        state.from = int32_t(from);
        fronts[end].push_back(state);
      }
    }
    used = prune(fronts[end],
                 {std::max(each.seconds, used.seconds / 4),
                  std::max(each.bytes, used.bytes / 4)},
                 scale);
  }
  std::vector<BucketPartition> all;
  for (const State &last : fronts[count]) {
    BucketPartition partition = model.finish(last);
    const State *state = &last;
    while (state->from >= 0) {
      partition.begins.push_back(state->begin);
      state = &fronts[size_t(state->begin)][size_t(state->from)];
    }
    std::reverse(partition.begins.begin(), partition.begins.end());
    all.push_back(std::move(partition));
  }
  return frontOf(std::move(all));
}

Repetition mlir::fsdp::findRepetition(const std::vector<BucketItem> &items) {
  Repetition best;
  auto count = int32_t(items.size());
  for (int32_t length = 1; length <= count / 2; ++length) {
    int32_t run = 0; // items that are like the one a period before
    for (int32_t i = length; i <= count; ++i) {
      if (i < count && areAlike(items[size_t(i)], items[size_t(i - length)])) {
        ++run;
        continue;
      }
      int32_t times = run / length + 1;
      if (times > 1 && times * length > best.count * best.length)
        best = {i - run - length, length, times};
      run = 0;
    }
  }
  return best;
}

std::vector<BucketPartition>
mlir::fsdp::findBucketsOfBlocks(const BucketProblem &problem, double epsilon) {
  Repetition blocks = findRepetition(problem.items);
  if (blocks.count <= kSolvedBlocks)
    return findBuckets(problem, epsilon);
  std::vector<BucketPartition> all;
  for (const BucketPartition &partition :
       findBuckets(shorten(problem, blocks), epsilon))
    all.push_back(
        evaluateBuckets(problem, repeatBuckets(partition.begins, blocks)));
  return frontOf(std::move(all));
}
