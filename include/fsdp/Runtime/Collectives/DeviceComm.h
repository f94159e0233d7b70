//===- DeviceComm.h - collectives of ranks with memory of their own -------===//
//
// FSDP2's data path on any device, over the communicators of a Transport: NCCL
// on GPUs, Gloo on CPUs. A rank keeps its shards; those of offloaded units lie
// in host memory that the device copies from by itself (pinned, on a GPU). A
// gather fills separate tensors, at the places that the plan has for them
// (plan::MemoryModel::Device).
//
// A gather goes straight from the shards to the full parameters, laid out as
// the operators want them: there is no copy-in except a cast, which writes this
// rank's part in place, and no copy-out. A reduction does what FSDP2's does, so
// that its sums have the same bits: one flat tensor per unit, with a row for
// each rank, in the dtype of the reduction (chunk_cat, zero padding), and one
// reduce-scatter or all-reduce.
//
// Communicators: "gather" and "reduce" connect the ranks of a replica;
// "replicate" connects the ranks that hold the same shard; "group.N" exists
// where reshards keep groups of N (FSDP2's post-forward mesh); "world" is for
// statistics and barriers. Those of a further plan are "plan 2 gather" and so
// on.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_COLLECTIVES_DEVICECOMM_H
#define FSDP_RUNTIME_COLLECTIVES_DEVICECOMM_H

#include "fsdp/Runtime/Collectives/Comm.h"
#include "fsdp/Runtime/Collectives/Communicator.h"
#include "fsdp/Runtime/Devices/Device.h"

#include <map>
#include <memory>

namespace fsdp::runtime {

class DeviceComm final : public Comm {
public:
  /// Borrows plan, to which plan::addDeviceBuffers has added the buffers, and
  /// device; connects this rank to the others. `other`: the DeviceComm of the
  /// same rank for another plan, over the same transport; this one uses its
  /// shards.
  DeviceComm(const plan::Plan &plan, Device &device,
             std::shared_ptr<Transport> transport,
             const DeviceComm *other = nullptr);

  int64_t rank() const override { return transport->rank(); }
  int64_t worldSize() const override { return transport->worldSize(); }
  int64_t shardIndex() const override { return plan.shardIndex(rank()); }
  int64_t ownBytes() const override { return 0; }

  at::Tensor shard(int32_t param) override { return shards[param]; }
  at::Tensor paddedShard(int32_t param) override { return paddedShards[param]; }
  /// Does nothing: the next gather reads the shards.
  void publish(bool) override {}

  void registerMemory(std::shared_ptr<DeviceMemory> memory,
                      size_t bytes) override {
    transport->registerMemory(memory->base(), bytes);
    registered.push_back(std::move(memory));
  }
  void beginStep(int64_t) override {}
  void beginMicrobatch() override {}
  void copyToDevice(int32_t unit, const at::Tensor &buffer) override;
  Collective allGather(int32_t unit, int64_t group,
                       const at::Tensor &source) override;
  std::vector<at::Tensor> gatherMasters(int32_t unit) override;
  void reshard(int32_t unit, int64_t keep, const at::Tensor &buffer) override;

  /// None: the flat tensor and a gradient have different layouts.
  void *reduceInput(int32_t) override { return nullptr; }
  Collective reduceScatter(const plan::ReduceScatter &reduce,
                           const std::vector<at::Tensor> &grads,
                           const at::Tensor &buffer) override;
  Collective allReduce(const plan::AllReduce &reduce,
                       const std::vector<at::Tensor> &shards,
                       const at::Tensor &buffer) override;
  void allReduce(const at::Tensor &vector, Reduction reduction) override;

  /// Does nothing: no other rank reads this one's parameters.
  void beginUpdate() override {}
  void barrier() override;
  void abort() override;
  std::vector<RankStats> exchangeStats(const RankStats &own) override;
  std::vector<std::vector<double>>
  gather(const std::vector<double> &own) override;

private:
  using Wait = Communicator::Wait;

  /// Zeros.
  void placeShards();
  void connectGroups();
  /// Copies on the thread's current stream; casts on the device.
  void copyFromHost(const at::Tensor &to, const at::Tensor &from) const;
  /// Reduces a vector that lies on the device.
  void allReduceHere(const at::Tensor &vector, Reduction reduction);
  /// To be called after a wait for the device: throws if its collectives were
  /// aborted.
  void checkFailure();
  at::Tensor empty(const std::vector<int64_t> &shape, plan::DType dtype) const;
  std::string nameOf(const char *kind, int32_t unit) const;
  /// What a gather of `param` begins with. `own` is this rank's shard; it is
  /// not empty unless this rank's part is.
  at::Tensor gather(int32_t param, const at::Tensor &own, plan::DType dtype,
                    std::vector<Communicator::Part> &parts,
                    std::vector<std::function<void()>> &after) const;
  Collective finishGather(Communicator &communicator, const std::string &what,
                          std::vector<at::Tensor> results,
                          const std::vector<Communicator::Part> &parts,
                          std::vector<std::function<void()>> after);
  Collective gatherKept(int32_t unit, int64_t group, const at::Tensor &source);
  Collective reduceAlone(const plan::ReduceScatter &reduce,
                         const std::vector<at::Tensor> &grads);
  /// Elements of a buffer of bytes, as a tensor.
  static at::Tensor partOf(const at::Tensor &buffer, int64_t begin,
                           int64_t elements, plan::DType dtype);
  /// Per parameter of a unit: this rank's shard in a copy_to_device's buffer;
  /// its share of what a reshard keeps.
  std::vector<at::Tensor> copiedShards(int32_t unit,
                                       const at::Tensor &buffer) const;
  std::vector<at::Tensor> keptShares(int32_t unit, int64_t keep,
                                     const at::Tensor &buffer) const;

  const plan::Plan &plan;
  Device &device;
  std::shared_ptr<Transport> transport;
  std::vector<std::shared_ptr<DeviceMemory>> registered;
  std::unique_ptr<Communicator> gathers, reduces, replicates, world;
  std::map<int64_t, std::unique_ptr<Communicator>> groups;
  /// Null where no unit is offloaded.
  std::shared_ptr<DeviceMemory> hostShards;
  std::vector<at::Tensor> shards, paddedShards;
  /// The number of plans over the same shards; it keeps the names of their
  /// communicators apart.
  std::shared_ptr<int64_t> plansMade;
  /// Per unit: the results of the last gather, until its reshard.
  std::vector<std::vector<at::Tensor>> gathered;
  /// RankStats of this rank, and of all ranks.
  at::Tensor ownStats, allStats;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_COLLECTIVES_DEVICECOMM_H
