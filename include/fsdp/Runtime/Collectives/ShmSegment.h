//===- ShmSegment.h - the memory the ranks of one host share --------------===//
//
// One anonymous file (memfd), so that nothing has a name in the file system
// and nothing can be left behind. It holds, in this order:
//
//   SegmentHeader                          launch-wide state
//   RankState[worldSize]                   counters, position, failure text
//   parameters [replicas]                  full, row-major, once a replica;
//                                          with a compute dtype once more in it
//   kept parameters [worldSize / k]        once a group that keeps them after
//                                          forward, for each parameter of it
//   vectors to all-reduce [worldSize][2]   where the plan clips gradients
//   per rank: reduce-scatter inputs        its gradients
//             all-reduce inputs            its gradients' shards
//
// The i-th rank of a replica owns rows shardRows(n, shards(), i) of the
// replica's parameters and writes no others. Ignored parameters are not here.
// plan::SegmentLayout computes the offsets.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_COLLECTIVES_SHMSEGMENT_H
#define FSDP_RUNTIME_COLLECTIVES_SHMSEGMENT_H

#include "fsdp/Plan/SegmentLayout.h"
#include "fsdp/Runtime/Collectives/Comm.h"
#include "fsdp/Runtime/Position.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::runtime {

using plan::SegmentLayout;

/// A monotonic counter that one rank advances and others wait for. 32 bits
/// because that is a futex word; comparisons are modulo 2^32.
struct alignas(64) Counter {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> waiters{0};

  /// Sets the counter and wakes the waiters. Only the owner calls this.
  void publish(uint32_t to);
  bool reached(uint32_t target) const {
    return int32_t(value.load(std::memory_order_acquire) - target) >= 0;
  }
  /// Sleeps until the counter is reached or about 50 ms have passed; true if
  /// reached.
  bool waitSlice(uint32_t target);
};

/// One rank's line of the segment.
struct RankState {
  std::atomic<int32_t> pid{0};
  Position position;
  /// The number of this rank's threads that wait for other ranks.
  std::atomic<int32_t> waits{0};
  /// Parameter versions published: 1 after the load, one more each step.
  Counter published;
  /// Parts of units this rank has put in its group's place, over all steps.
  Counter partsKept;
  /// Units copied to the device, over all steps.
  Counter copied;
  /// Updates before which this rank has finished reading the parameters.
  Counter released;
  /// Reductions whose inputs this rank has put in place, over all steps.
  Counter inputsReady;
  /// Reductions whose peers' inputs this rank has read, over all steps.
  Counter inputsRead;
  /// Vectors this rank has put in place to be all-reduced, over all steps.
  Counter vectorsReady;
  /// Rounds of all-reduces whose inputs this rank has put in place, over all
  /// steps, and rounds whose inputs from the other replicas it has read. Each
  /// unit is all-reduced at most once a round.
  Counter shardsReady;
  Counter shardsRead;
  /// Barriers this rank has come to.
  Counter barriers;
  /// Exchanges for which this rank has written its statistics.
  Counter statsWritten;
  /// Ring of two: a rank that writes the statistics of exchange n has read all
  /// of n - 1, so all ranks have read those of n - 2.
  RankStats stats[2];
  /// What this rank has for Comm::gather, a part at a time.
  double numbers[256];
  /// Null-terminated message, complete before SegmentHeader::failedRank is
  /// set to this rank.
  char failure[2048];
};

struct SegmentHeader {
  /// Non-zero: all ranks stop.
  std::atomic<uint32_t> aborted{0};
  /// The first rank that failed, -1 if none did.
  std::atomic<int32_t> failedRank{-1};
  /// What the launcher asks the run for, as RankStats::requests; rank 0 takes
  /// it at the end of a step.
  std::atomic<uint32_t> requests{0};
  /// A rank has passed its deadline: other ranks may not exit by themselves.
  std::atomic<uint32_t> hung{0};
  /// As in Patience.
  std::atomic<int64_t> longestStep{0};
};

/// The mapping. Whoever creates it may fork; the children share it.
class ShmSegment {
public:
  /// Creates a zeroed segment with its header initialised.
  explicit ShmSegment(const plan::Plan &plan);
  /// Maps the segment that another process created; `path` is its
  /// /proc/<pid>/fd/<fd>.
  ShmSegment(const plan::Plan &plan, const std::string &path);
  ShmSegment(const ShmSegment &) = delete;
  ShmSegment &operator=(const ShmSegment &) = delete;
  ~ShmSegment();

  const SegmentLayout &layout() const { return offsets; }
  int fd() const { return memoryFd; }
  SegmentHeader &header() const;
  RankState &state(int64_t rank) const;
  std::byte *param(int64_t replica, int32_t param) const {
    return replicaBase(replica) + offsets.params[param];
  }
  std::byte *master(int64_t replica, int32_t param) const {
    return replicaBase(replica) + offsets.masters[param];
  }
  /// What the group of `rank` keeps of a parameter between its ranks.
  std::byte *kept(int64_t rank, int32_t param) const {
    const SegmentLayout::KeptPlace &place = offsets.kept[param];
    return base + place.begin + size_t(rank / place.group) * place.stride;
  }
  /// A rank's copy of a parameter's gradient.
  std::byte *grad(int64_t rank, int32_t param) const {
    return base + offsets.areasBegin + size_t(rank) * offsets.areaBytes +
           offsets.grads[param];
  }
  /// A rank's vector to all-reduce; `slot` is 0 or 1.
  std::byte *vector(int64_t rank, uint32_t slot) const {
    return base + offsets.vectorsBegin +
           (size_t(rank) * 2 + slot) * offsets.vectorBytes;
  }
  /// A rank's shard of a parameter's gradient, the input of an all-reduce.
  std::byte *shardGrad(int64_t rank, int32_t param) const {
    return base + offsets.areasBegin + size_t(rank) * offsets.areaBytes +
           offsets.shardGrads[param];
  }
  /// Uses the parameters of another segment, which must outlive this one, in
  /// place of its own, whose pages are then never touched. Throws InputError if
  /// the other's are laid out differently.
  void useParametersOf(const ShmSegment &other);
  /// Records why a rank failed and stops everybody. The first call wins.
  void fail(int64_t rank, const std::string &message) const;
  /// Stops everybody without recording a cause.
  void abort() const { header().aborted.store(1); }

private:
  void map();
  std::byte *replicaBase(int64_t replica) const {
    return parameters + size_t(replica) * offsets.replicaBytes;
  }

  SegmentLayout offsets;
  int memoryFd = -1;
  std::byte *base = nullptr;
  std::byte *parameters = nullptr;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_COLLECTIVES_SHMSEGMENT_H
