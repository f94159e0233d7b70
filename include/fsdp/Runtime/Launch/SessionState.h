//===- SessionState.h - a session's tensors, as checkpoints have them -----===//
//
// Names are those of docs/checkpoints.md: a parameter's and a buffer's own,
// `optimizer.state.NAME.exp_avg` and so on, `rank.0.rng.cpu`.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_LAUNCH_SESSIONSTATE_H
#define FSDP_RUNTIME_LAUNCH_SESSIONSTATE_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Checkpoint/NativeCheckpoint.h"
#include "fsdp/Runtime/Checkpoint/SaveProtocol.h"
#include "fsdp/Runtime/Devices/Device.h"
#include "fsdp/Runtime/Execution/Session.h"

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace fsdp::runtime {

/// The state of one rank. Borrows all its arguments.
class SessionState {
public:
  SessionState(const plan::Plan &plan, Session &session, Device &device)
      : plan(plan), session(session), device(device) {}

  /// The tensors that this rank saves, after Session::start, between steps:
  /// SaveRequest::chunks and own. With `copies` they are copies in host memory,
  /// which this object keeps until the next call. Otherwise tensors that lie on
  /// the host are the session's own, which no step may write until the save has
  /// ended.
  ///
  /// Where several ranks have the same shards (replicas), one of them saves
  /// each parameter, such that all ranks save about equally many bytes.
  ///
  /// The state of the `later` units, which the plan stages, is not copied yet:
  /// copyUnit copies it, and isStaged says when all of it is copied.
  void stage(SaveRequest &request, bool copies,
             const std::set<int32_t> &later = {});
  /// Begins to copy what the last stage() left out of a unit, and returns the
  /// wait for the copy, which is empty if the device's current stream orders
  /// it. To be called from one thread at a time.
  Interpreter::Wait copyUnit(int32_t unit);
  bool isStaged() const { return postponed.empty(); }

  /// Before Session::start: reads parameters and buffers, at any world size.
  /// Throws InputError, which names what the checkpoint lacks or has
  /// differently from the plan.
  void readModel(const NativeCheckpoint &checkpoint);
  /// After Session::start: reads the optimizer's state, and counters; and this
  /// rank's generators, if the checkpoint is of equally many ranks. Otherwise
  /// the device's generator is seeded with the sum of seed and steps. Throws
  /// InputError, also for something that the plan does not have.
  void readTraining(const NativeCheckpoint &checkpoint);

private:
  /// A tensor of this rank's.
  struct Item {
    std::string name;
    plan::TensorSpec spec; ///< of the whole tensor
    Chunk chunk;
    at::Tensor tensor;
    /// Each rank has one of its own.
    bool isOwn = false;
    /// Each rank has the same, whole.
    bool isShared = false;
    int32_t unit = -1; ///< of its parameter; -1: none
  };
  struct Copy {
    at::Tensor to, from;
  };

  Item paramItem(int32_t param) const;
  std::vector<Item> modelItems() const;
  std::vector<Item> optimizerItems() const;
  std::vector<std::pair<std::string, at::Generator>> generators() const;
  void read(const NativeCheckpoint &checkpoint, const Item &item) const;
  /// Where the tensor's bytes are, row-major, on the host.
  void stage(std::vector<ShardTensor> &to, const Item &item, bool copies,
             bool later);
  /// The replica that saves each of the items.
  std::vector<int64_t> writers(const std::vector<Item> &items) const;

  const plan::Plan &plan;
  Session &session;
  Device &device;
  std::unique_ptr<DeviceMemory> staging;
  size_t staged = 0;
  /// Staged tensors that lie elsewhere.
  std::vector<at::Tensor> kept;
  /// By unit: copies to be made.
  std::map<int32_t, std::vector<Copy>> postponed;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_LAUNCH_SESSIONSTATE_H
