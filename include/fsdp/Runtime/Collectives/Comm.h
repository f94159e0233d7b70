//===- Comm.h - collectives of a plan, whatever carries them --------------===//
//
// What the executor and the optimizer need from the ranks' communication. One
// implementation holds parameters and gradients in shared memory (ShmComm.h);
// the interface leaves room for ones that move them between devices.
//
// Calls of one kind of collective, and all others together, come from one
// thread at a time, in the order of the plan, which is the same on every rank.
// Where each of a plan's streams has its own thread, these kinds run on
// different threads; the plan's events order whatever depends on something
// else. A call that waits for a peer throws RunError if the peer dies, or
// AbortedError if a peer failed and reports the failure itself.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_COLLECTIVES_COMM_H
#define FSDP_RUNTIME_COLLECTIVES_COMM_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Devices/Device.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace fsdp::runtime {

/// What each rank tells the others at the end of a step.
struct RankStats {
  double loss = 0;
  /// The most bytes that this rank had allocated at once, including its share
  /// of the segment.
  int64_t peakBytes = 0;
  /// The process's peak resident bytes, as the kernel counts them (VmHWM).
  int64_t peakRssBytes = 0;
  /// Valid only if the step was followed by an evaluation.
  double evaluationLoss = 0;
  int64_t scratchBytes = 0;    ///< RankArena::extraBytes
  int64_t heapAllocations = 0; ///< in this step and the evaluation after it
  int64_t badGradient = -1;    ///< StepResult::badGradient
  /// What this rank is asked to do between this step and the next: bits that
  /// the Comm does not interpret. Every rank gets the bits of all ranks.
  uint32_t requests = 0;
};

/// A collective that this rank has begun.
struct Collective {
  std::vector<at::Tensor> results;
  /// Waits until the results' contents are ready; further calls do nothing. The
  /// Comm, and the instruction that began the collective, must live until then.
  std::function<void()> wait;
};

/// How allReduce combines.
enum class Reduction { Sum, Max };

class Comm {
public:
  virtual ~Comm() = default;

  virtual int64_t rank() const = 0;
  virtual int64_t worldSize() const = 0;
  /// Position among the ranks that share one copy of the parameters.
  virtual int64_t shardIndex() const = 0;
  /// Bytes of communication memory that count as this rank's.
  virtual int64_t ownBytes() const = 0;

  /// This rank's rows of a parameter (possibly none); for an ignored parameter,
  /// which each rank has for itself, all of it. The tensor is the parameter's
  /// storage for the whole run: the optimizer writes it between beginUpdate and
  /// publish, and the initial load writes it before the first publish.
  virtual at::Tensor shard(int32_t param) = 0;
  /// The same, padded to as many rows as rank 0's shard has, in one contiguous
  /// piece of memory; nobody uses what follows the shard's own rows.
  virtual at::Tensor paddedShard(int32_t param) = 0;
  /// Makes this rank's rows of all parameters available to allGather. Rows of
  /// frozen parameters that were written after the first publish are included
  /// only with `frozen`.
  virtual void publish(bool frozen = false) = 0;

  /// Registers memory whose first `bytes` hold tensors that collectives will
  /// read and write from now on; the Comm keeps it as long as it needs it.
  /// Called by all ranks alike.
  virtual void registerMemory(std::shared_ptr<DeviceMemory> memory,
                              size_t bytes) {}

  /// Begins step `step`, counted from 0.
  virtual void beginStep(int64_t step) = 0;
  /// Begins the next microbatch of the step; beginStep begins the first.
  virtual void beginMicrobatch() = 0;
  // A `buffer` is the buffer of the plan's instruction (plan::bufferSpec),
  // where each rank has its own memory; nobody else uses it until the
  // instruction is complete.

  /// Copies this rank's shards of an offloaded unit to the device, for the
  /// next allGather of the unit.
  virtual void copyToDevice(int32_t unit, const at::Tensor &buffer = {}) = 0;
  /// Begins to gather the full parameters of a unit in their compute dtypes, in
  /// the unit's order. They are valid until reshard(unit). They come from what
  /// every rank has published or, with `group` > 0, from what the ranks of this
  /// rank's group keep (see plan::Reshard::keep); `source` is the buffer that
  /// holds this rank's part.
  virtual Collective allGather(int32_t unit, int64_t group = 0,
                               const at::Tensor &source = {}) = 0;
  /// The same in the parameters' own dtypes, from the parts of all ranks.
  virtual std::vector<at::Tensor> gatherMasters(int32_t unit) = 0;
  /// With `keep` > 0, this rank keeps its part of the unit's gathered
  /// parameters for the next allGather in groups of `keep` ranks.
  virtual void reshard(int32_t unit, int64_t keep = 0,
                       const at::Tensor &buffer = {}) = 0;

  /// Where the gradient of `param` should be written (full size, row-major)
  /// so that reduceScatter need not copy it; null if there is no such place.
  virtual void *reduceInput(int32_t param) = 0;
  /// Begins the reduction of `grads` (full gradients of reduce.params) over the
  /// ranks of the replica, as plan::ReduceScatter says, on CPUs in Gloo's
  /// order. The results are this rank's rows.
  virtual Collective reduceScatter(const plan::ReduceScatter &reduce,
                                   const std::vector<at::Tensor> &grads,
                                   const at::Tensor &buffer = {}) = 0;

  /// Begins to average shards over the replicas; the shards' contents must be
  /// ready. All all-reduces begun since the last wait for one end together; a
  /// unit is among them at most once.
  virtual Collective allReduce(const plan::AllReduce &reduce,
                               const std::vector<at::Tensor> &shards,
                               const at::Tensor &buffer = {}) = 0;

  /// Combines a vector of float32 or float64 over the ranks of a replica, in
  /// place, on CPUs in Gloo's order, wherever it lies; it has at most one
  /// element for each parameter. Max gives NaN where any rank has NaN. For
  /// plans that clip or unscale gradients.
  virtual void allReduce(const at::Tensor &vector, Reduction reduction) = 0;

  /// Waits until no rank reads the parameters any more. All collectives of the
  /// step have been waited for.
  virtual void beginUpdate() = 0;

  /// Waits until every rank is here.
  virtual void barrier() = 0;

  /// Makes every wait of every rank fail with AbortedError. May be called from
  /// any thread.
  virtual void abort() = 0;

  /// Ends a step: every rank gets the statistics of all ranks, indexed by rank.
  virtual std::vector<RankStats> exchangeStats(const RankStats &own) = 0;

  /// Returns every rank's numbers on rank 0, and nothing on the others; all
  /// ranks give equally many. Not to be called within a step.
  virtual std::vector<std::vector<double>>
  gather(const std::vector<double> &own) = 0;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_COLLECTIVES_COMM_H
