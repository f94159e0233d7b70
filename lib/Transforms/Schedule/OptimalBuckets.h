//===- OptimalBuckets.h - which neighbours to gather together -------------===//
//
// Contiguous partitions of a list of parameters, by exposed communication and
// peak memory: the Pareto front by dynamic programming, on plain numbers.
//
// The model. A bucket of neighbours is gathered in forward, again in backward
// where it was resharded, and its gradients are reduced in backward, each as
// one transfer that takes the link's latency and its bytes. Buckets are used in
// the order of the list in forward and in the reverse order in backward.
//
// - Gathers of forward follow each other from the step's beginning on; compute
//   waits for the one that it needs.
// - Gathers of backward follow each other, each not before its parameters were
//   resharded in forward. Reductions follow each other on a communicator of
//   their own, each when all gradients of its bucket are there; the one
//   `reducesInFlight` before it must have ended then, and all of them in the
//   end. What compute waits moves everything after it.
// - Both share the link: together they take at least the sum of their times.
// - Every second of a transfer costs compute `slowdown` seconds.
// - While a bucket is used, it is in memory, the next of the phase, which is
//   prefetched, the gradients of `reducesInFlight` buckets before it and its
//   own, and whatever else is alive.
//
// Which is a path length in max-plus algebra: every transition is monotone in
// every number of its state, so that a state that is no better than another in
// any of them can be dropped.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_LIB_TRANSFORMS_SCHEDULE_OPTIMALBUCKETS_H
#define FSDP_LIB_TRANSFORMS_SCHEDULE_OPTIMALBUCKETS_H

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace mlir::fsdp {

/// Seconds of one kind of transfer.
struct LinkTime {
  double latency = 0;
  double perByte = 0;
  double of(double bytes) const {
    return bytes > 0 ? latency + perByte * bytes : 0;
  }
};

/// A parameter, or several that stay together. Times are seconds of the compute
/// stream from the step's beginning, if nothing has to be waited for.
struct BucketItem {
  /// Neighbours of one kind may be in one bucket.
  int32_t kind = 0;
  /// Whether it must be gathered in forward, and again in backward. In a
  /// bucket, all items are gathered where one is needed.
  bool inForward = true, inBackward = true;
  double gatherBytes = 0; ///< on the link
  double reduceBytes = 0; ///< on the link; 0: it has no gradient
  int64_t gathered = 0;   ///< in memory; 0 if it is counted with what else is
  int64_t gradient = 0;   ///< in memory, until it is reduced; and the
                          ///< reduction's buffer
  double forwardUse = 0;  ///< first use in forward
  double forwardEnd = 0;  ///< last use in forward
  double backwardUse = 0; ///< first use in backward
  double reduceBegin = 0; ///< its gradient is there
  /// Most bytes of everything else alive while it is used.
  int64_t forwardPeak = 0, backwardPeak = 0;
};

struct BucketProblem {
  std::vector<BucketItem> items;
  LinkTime gather; ///< in forward
  LinkTime again;  ///< in backward
  LinkTime reduce;
  double slowdown = 0;
  double backwardBegin = 0;
  double end = 0; ///< of backward
  /// At most kMostReducesInFlight; more are treated as that many.
  int32_t reducesInFlight = 1;
  /// Most bytes alive at any time, without gathers and whole gradients.
  int64_t otherPeak = 0;
  /// Bytes on the link of a bucket of more than one item.
  double mostBytes = std::numeric_limits<double>::infinity();
};
inline constexpr int32_t kMostReducesInFlight = 4;

struct BucketPartition {
  std::vector<int32_t> begins; ///< the first item of each bucket, ascending
  /// Seconds that the step takes longer than compute alone.
  double exposed = 0;
  int64_t peak = 0; ///< bytes
};

/// What the model says of a partition.
BucketPartition evaluateBuckets(const BucketProblem &problem,
                                std::vector<int32_t> begins);

/// The partitions that no other beats in both, the fastest first. Exact with
/// epsilon 0. Otherwise states closer than epsilon / items in every number,
/// relative to `end` and to the largest peak, count as one, so that a partition
/// is missed by at most epsilon in both; where more states than kMostStates
/// remain at an item, the tolerance is doubled until they do not.
std::vector<BucketPartition> findBuckets(const BucketProblem &problem,
                                         double epsilon);
inline constexpr std::size_t kMostStates = 128;

/// A run of items that repeats: `count` times `length` items from `begin` on.
struct Repetition {
  int32_t begin = 0, length = 0, count = 0;
};
/// The repetition that covers the most items, with the shortest period: its
/// items are alike in everything but times and what else is alive.
Repetition findRepetition(const std::vector<BucketItem> &items);

/// The same for a long list of isomorphic blocks: it is solved with
/// `kSolvedBlocks` of them, half at either end, and the buckets of a period in
/// the middle are repeated for the others, then evaluated on the whole list. So
/// the time does not grow with the number of blocks; what is lost is the
/// freedom to treat blocks in the middle differently.
std::vector<BucketPartition> findBucketsOfBlocks(const BucketProblem &problem,
                                                 double epsilon);
inline constexpr int32_t kSolvedBlocks = 6;

} // namespace mlir::fsdp

#endif // FSDP_LIB_TRANSFORMS_SCHEDULE_OPTIMALBUCKETS_H
