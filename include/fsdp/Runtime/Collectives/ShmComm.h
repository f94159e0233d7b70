//===- ShmComm.h - collectives over shared memory -------------------------===//
//
// Nothing is copied to gather: every rank's optimizer writes its rows of the
// one full parameter that all ranks map, so an all-gather waits for the peers'
// counters and hands out views. A parameter with a compute dtype is stored
// twice: a rank casts its rows when it publishes them. What the ranks of a
// post-forward group keep lies in one place that the group shares: keeping
// copies, gathering from there does not. A reduce-scatter reads the peers'
// gradients where they lie. The reads may happen later than the call, as late
// as when the inputs' place is needed again or the step's update begins, so
// that a rank does not wait for a straggler at every unit.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_COLLECTIVES_SHMCOMM_H
#define FSDP_RUNTIME_COLLECTIVES_SHMCOMM_H

#include "fsdp/Plan/Messages.h"
#include "fsdp/Runtime/Collectives/Comm.h"
#include "fsdp/Runtime/Collectives/Patience.h"
#include "fsdp/Runtime/Collectives/SegmentSights.h"
#include "fsdp/Runtime/Collectives/ShmSegment.h"

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

namespace fsdp::runtime {

class ShmComm : public Comm {
public:
  /// Borrows plan and segment. `concurrent`: each stream is a thread; the
  /// thread that begins a reduction then also finishes it. Throws InputError if
  /// the plan reduces gradients that are not floating-point. `other`: the
  /// ShmComm of the same rank for another plan, whose parameters the segment
  /// uses; ignored parameters, and shards outside the segment, are then also
  /// those of `other`.
  ShmComm(const plan::Plan &plan, ShmSegment &segment, int64_t rank,
          bool concurrent = false, const ShmComm *other = nullptr);
  ~ShmComm() override;

  /// Sets how long this rank waits; by default, as Patience does. To be called
  /// before it waits.
  void setPatience(std::shared_ptr<const Patience> given) {
    patience = std::move(given);
  }

  int64_t rank() const override { return ownRank; }
  int64_t worldSize() const override { return plan.worldSize; }
  int64_t shardIndex() const override { return plan.shardIndex(ownRank); }
  int64_t ownBytes() const override;
  at::Tensor shard(int32_t param) override;
  at::Tensor paddedShard(int32_t param) override;
  void publish(bool frozen = false) override;
  void beginStep(int64_t step) override;
  void beginMicrobatch() override;
  void copyToDevice(int32_t unit, const at::Tensor &buffer = {}) override;
  Collective allGather(int32_t unit, int64_t group = 0,
                       const at::Tensor &source = {}) override;
  std::vector<at::Tensor> gatherMasters(int32_t unit) override;
  void reshard(int32_t unit, int64_t keep = 0,
               const at::Tensor &buffer = {}) override;
  void *reduceInput(int32_t param) override;
  Collective reduceScatter(const plan::ReduceScatter &reduce,
                           const std::vector<at::Tensor> &grads,
                           const at::Tensor &buffer = {}) override;
  void allReduce(const at::Tensor &vector, Reduction reduction) override;
  Collective allReduce(const plan::AllReduce &reduce,
                       const std::vector<at::Tensor> &shards,
                       const at::Tensor &buffer = {}) override;
  void beginUpdate() override;
  void barrier() override;
  void abort() override { segment.abort(); }
  std::vector<RankStats> exchangeStats(const RankStats &own) override;
  std::vector<std::vector<double>>
  gather(const std::vector<double> &own) override;

private:
  /// Casts this rank's rows into the place that peers gather from.
  void copyOwnRows(int32_t param);
  /// A reduction whose inputs are in place, but whose result is not computed
  /// yet.
  struct Pending {
    uint32_t index;
    const plan::ReduceScatter *reduce;
    std::vector<at::Tensor> outs;
  };
  /// An all-reduce, whose inputs are those of earlier reductions.
  struct PendingAllReduce {
    const plan::AllReduce *reduce;
    std::vector<at::Tensor> outs;
  };
  /// What a wait is for, spelled out only in an error.
  struct Waiting {
    const char *collective;
    int32_t unit = -1;
  };

  /// Waits until `counter` of a peer has reached `target`.
  void wait(int64_t peer, Counter RankState::*counter, uint32_t target,
            Waiting waiting);
  void waitAll(const std::vector<int64_t> &ranks, Counter RankState::*counter,
               uint32_t target, Waiting waiting);
  /// Whether all ranks of the replica have reached `target`.
  bool allReached(Counter RankState::*counter, uint32_t target) const;
  /// Where this rank's result of a reduction goes: to the place where the other
  /// replicas read it, or to memory of its own if it is not all-reduced.
  at::Tensor shardGrad(const plan::ReduceScatter &reduce, size_t index) const;
  /// The place where the other replicas read a shard.
  at::Tensor shardPlace(int32_t param, at::ScalarType dtype) const;
  /// Waits until the other replicas have read this rank's shards of the last
  /// round of all-reduces.
  void awaitShardsRead();
  bool peerDied(int64_t peer);
  /// Copies this rank's part of a unit's parameters to its group's place,
  /// unless that already holds the same version.
  void keepPart(int32_t unit, int64_t groupSize);
  /// Gathers the parts of this rank's group; views of the group's place.
  Collective gatherParts(int32_t unit, int64_t groupSize);
  /// Makes the place of the step's `ordinal`-th reduction writable.
  void acquire(int32_t ordinal);
  /// Waits until nobody reads the inputs of the reductions below `below`, which
  /// this rank has begun or, if concurrent, will begin.
  void awaitInputsRead(uint32_t below);
  /// Finishes the pending reductions below `index`.
  void finish(uint32_t index);
  void finishFirst();
  void finishAllReduces();
  /// This rank's part of a parameter where it lies in `whole`.
  at::Tensor shardOf(const at::Tensor &whole, int32_t param) const;
  /// Throws if a wait, which `where` describes, cannot succeed.
  void checkWait(int64_t peer, const Counter &counter, uint32_t target,
                 const std::string &where);
  RankState &own() { return segment.state(ownRank); }

  const plan::Plan &plan;
  ShmSegment &segment;
  const int64_t ownRank;
  const bool concurrent;
  SegmentSights sights;
  std::shared_ptr<const Patience> patience = std::make_shared<Patience>();
  /// Plan::shardGroup and so on, of this rank; and all ranks.
  std::vector<int64_t> shardGroup, replicateGroup, everybody;
  /// Whole parameters in their own dtype, and in the one they are gathered in;
  /// those that are not ignored lie in the segment.
  std::vector<at::Tensor> masters;
  std::vector<at::Tensor> fullParams;
  /// This rank's part of each parameter that is sharded on a dimension other
  /// than 0, row-major as the optimizer needs it; publish() copies it to the
  /// whole. Undefined for other parameters.
  std::vector<at::Tensor> ownShards;
  std::mutex pidfdLock;
  std::vector<int> pidfds;
  int64_t step = 0;
  uint32_t versions = 0;
  uint32_t copies = 0;
  uint32_t barriers = 0;
  uint32_t exchanges = 0;
  /// Updates begun. (A step's number may be set back.)
  uint32_t releases = 0;
  /// Parts kept, over all steps; and per unit the number of the last one and
  /// the version of its parameters.
  uint32_t partsKept = 0;
  struct KeptPart {
    uint32_t number = 0;
    uint32_t version = 0;
  };
  std::vector<KeptPart> keptParts;
  const plan::Messages messages;
  /// Reductions of all microbatches before this one.
  uint32_t stepBase = 0;
  uint32_t allReduces = 0;
  int32_t issued = 0;
  /// Places of reductions below it are writable; not kept if concurrent.
  int32_t acquired = 0;
  std::deque<Pending> pending;
  std::vector<PendingAllReduce> pendingAllReduces;
  /// Rounds of all-reduces finished, over all steps.
  std::atomic<uint32_t> allReduceRounds = 0;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_COLLECTIVES_SHMCOMM_H
