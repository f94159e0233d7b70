//===- Comm.h - collectives of a plan, whatever carries them --------------===//
//
// What the executor and the optimizer need from the ranks' communication. One
// implementation holds parameters and gradients in shared memory (ShmComm.h);
// the interface leaves room for ones that move them between devices.
//
// Calls of one kind of collective, and all others together, come from one
// thread at a time, in the order of the plan, which is the same on every rank.
// With the streams of a plan on threads of their own, these kinds are on
// different ones; the plan's events order what depends on each other. A call
// that waits for a peer throws RunError if the peer dies, AbortedError if a
// peer failed and reports that itself.
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
  /// Most bytes this rank had allocated at once, its share of the segment
  /// included.
  int64_t peakBytes = 0;
  /// The kernel's count of the process's most resident bytes (VmHWM).
  int64_t peakRssBytes = 0;
  /// Where the step was followed by an evaluation.
  double evaluationLoss = 0;
  int64_t scratchBytes = 0;    ///< RankArena::extraBytes
  int64_t heapAllocations = 0; ///< in this step and the evaluation after it
  int64_t badGradient = -1;    ///< StepResult::badGradient
  /// What this rank is asked for between this step and the next: bits that the
  /// Comm knows nothing of. Every rank gets those of all.
  uint32_t requests = 0;
};

/// A collective that this rank has begun.
struct Collective {
  std::vector<at::Tensor> results;
  /// Waits until the results' contents are there; further calls do nothing.
  /// The Comm, and the instruction that was begun, must live until then.
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

  /// This rank's rows of a parameter (possibly none), all of an ignored one,
  /// which is this rank's own. The tensor is the
  /// parameter's storage for the whole run: the optimizer writes it between
  /// beginUpdate and publish, the initial load before the first publish.
  virtual at::Tensor shard(int32_t param) = 0;
  /// The same with as many rows as rank 0's shard has, in one piece of memory;
  /// what is behind the shard's own is nobody's.
  virtual at::Tensor paddedShard(int32_t param) = 0;
  /// Makes this rank's rows of all parameters available to allGather; those of
  /// frozen ones, where they were written after the first publish, only with
  /// `frozen`.
  virtual void publish(bool frozen = false) = 0;

  /// Memory in the first `bytes` of which tensors lie that collectives will
  /// read and write, from now on; kept as long as the Comm needs it. Called by
  /// all ranks alike.
  virtual void registerMemory(std::shared_ptr<DeviceMemory> memory,
                              size_t bytes) {}

  /// Begins step `step`, counted from 0.
  virtual void beginStep(int64_t step) = 0;
  /// Begins the next microbatch of the step; beginStep begins the first.
  virtual void beginMicrobatch() = 0;
  // A `buffer` is that of the plan's instruction (plan::bufferSpec), where
  // ranks have memory of their own; nobody else uses it until the instruction
  // is complete.

  /// Copies this rank's shards of an offloaded unit to the device, for the
  /// next allGather of the unit.
  virtual void copyToDevice(int32_t unit, const at::Tensor &buffer = {}) = 0;
  /// Begins to gather the full parameters of a unit in their compute dtypes, in
  /// the unit's order, valid until reshard(unit): from what every rank has
  /// published, with `group` > 0 from what the ranks of this rank's group keep
  /// (see plan::Reshard::keep); `source` is the buffer with this rank's part.
  virtual Collective allGather(int32_t unit, int64_t group = 0,
                               const at::Tensor &source = {}) = 0;
  /// The same in the parameters' own dtypes, of all ranks' parts.
  virtual std::vector<at::Tensor> gatherMasters(int32_t unit) = 0;
  /// With `keep` > 0 this rank keeps its part of the unit's parameters, which
  /// are gathered, for the next allGather in groups of as many.
  virtual void reshard(int32_t unit, int64_t keep = 0,
                       const at::Tensor &buffer = {}) = 0;

  /// Where the gradient of `param` should be written (full size, row-major)
  /// so that reduceScatter need not copy it; null if there is no such place.
  virtual void *reduceInput(int32_t param) = 0;
  /// Begins the reduction of `grads` (full gradients of reduce.params) over the
  /// ranks of the replica, as plan::ReduceScatter says, in ascending rank
  /// order. The results are this rank's rows.
  virtual Collective reduceScatter(const plan::ReduceScatter &reduce,
                                   const std::vector<at::Tensor> &grads,
                                   const at::Tensor &buffer = {}) = 0;

  /// Begins the average over the replicas of shards whose contents are there.
  /// All-reduces begun since the last wait for one end together; a unit is
  /// among them at most once.
  virtual Collective allReduce(const plan::AllReduce &reduce,
                               const std::vector<at::Tensor> &shards,
                               const at::Tensor &buffer = {}) = 0;

  /// Combines a vector of float32 or float64 over the ranks of a replica, in
  /// place, in ascending rank order, wherever it lies; it has at most one
  /// element for each parameter. Max gives NaN where any rank has NaN. For
  /// plans that clip or unscale gradients.
  virtual void allReduce(const at::Tensor &vector, Reduction reduction) = 0;

  /// Waits until no rank reads the parameters any more. All collectives of the
  /// step have been waited for.
  virtual void beginUpdate() = 0;

  /// Waits until every rank is here.
  virtual void barrier() = 0;

  /// Lets every wait of every rank fail with AbortedError, from any thread.
  virtual void abort() = 0;

  /// Ends a step: every rank gets the statistics of all, by rank.
  virtual std::vector<RankStats> exchangeStats(const RankStats &own) = 0;

  /// Every rank's numbers, as many of each, on rank 0; nothing on the others.
  /// Not in a step.
  virtual std::vector<std::vector<double>>
  gather(const std::vector<double> &own) = 0;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_COLLECTIVES_COMM_H
