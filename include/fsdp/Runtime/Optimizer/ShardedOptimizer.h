//===- ShardedOptimizer.h - torch.optim's updates on parameter shards -----===//
#ifndef FSDP_RUNTIME_OPTIMIZER_SHARDEDOPTIMIZER_H
#define FSDP_RUNTIME_OPTIMIZER_SHARDEDOPTIMIZER_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Optimizer/OptimizerPlugin.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::runtime {

/// Adam, AdamW and SGD, bit-equal to torch.optim on the same shards: with
/// `fused` the fused ATen kernel, otherwise the operators of
/// torch/optim/adam.py and sgd.py, as torch.optim chooses for a parameter
/// group: `_multi_tensor_*` if all of it lies on a GPU, otherwise
/// `_single_tensor_*`. On the CPU both give the same bits. Besides the state
/// and the gradients, the first uses at most as many bytes at once as the
/// shards of the group have, the second at most three times those of the
/// largest shard. The optimizer may also be a plug-in.
class ShardedOptimizer {
public:
  enum class Path : uint8_t { SingleTensor, Foreach };
  /// torch.optim's choice for shards of a parameter group on these devices.
  static Path defaultPath(const std::vector<c10::Device> &places);

  /// What a gradient scaler tells the kernels, as float32 scalars. The kernels
  /// divide the gradients by `gradScale` in place; if `foundInf` is 1 rather
  /// than 0, they change neither parameters nor state. They do not report that,
  /// so the caller must set steps() back.
  struct Scaling {
    std::optional<at::Tensor> gradScale, foundInf;
  };

  /// `settings` has one element for each parameter group, of one optimizer;
  /// shard i belongs to settings[groupOf[i]], all to the first if groupOf is
  /// empty. `shards` are updated in place; empty ones are skipped. Throws
  /// InputError for settings that torch.optim or the plug-in refuses. A
  /// plug-in's library is a path relative to the working folder. `path` is
  /// torch.optim's choice if not given.
  ShardedOptimizer(const std::vector<plan::Optimizer> &settings,
                   const std::vector<int32_t> &groupOf,
                   const std::vector<at::Tensor> &shards,
                   std::optional<Path> path = std::nullopt);

  /// `grads` in the order of the shards, of the same shapes. Every group's
  /// learning rate is multiplied by `lrFactor`, as LambdaLR does. `scaling` is
  /// for fused optimizers.
  void step(const std::vector<at::Tensor> &grads, double lrFactor = 1.0,
            const Scaling &scaling = {});
  /// Whether all groups use the fused kernel.
  bool isFused() const;

  /// One element for each parameter group, as the constructor takes them.
  const std::vector<plan::Optimizer> &currentSettings() const {
    return settings;
  }
  /// Takes effect from the next step on. Throws InputError, and changes
  /// nothing, if the number of groups differs or the state would change:
  /// `name`, `amsgrad`, `fused`, a plug-in's library and options, and whether
  /// there is a momentum, must stay the same.
  void setSettings(const std::vector<plan::Optimizer> &changed);

  using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
  /// What a shard's next update depends on, by torch.optim's names (`step`,
  /// `exp_avg`, …), or `state0`, … for a plug-in. The tensors are the ones that
  /// updates change, and may be written between two updates; an empty shard's
  /// are not used by any update, but have the same names and shapes as others.
  NamedTensors state(size_t shard);
  /// Takes other tensors, of the names, shapes and dtypes that `state` has, as
  /// those that updates change; none for an empty shard. Without tensors the
  /// state is what it is before a first update, and SGD's next update, as
  /// torch.optim's for a parameter without a momentum_buffer, makes the
  /// gradient its momentum. Throws InputError for other tensors.
  void bindState(size_t shard, const NamedTensors &tensors);
  /// Updates made so far, including those before the state was set.
  int64_t steps() const { return stepsDone; }
  void setSteps(int64_t steps) { stepsDone = steps; }

private:
  /// Parameters of one group, dtype and device, which one fused call takes
  /// together.
  struct Group {
    size_t settings = 0; ///< index into the constructor's settings
    Path path = Path::SingleTensor;
    std::vector<size_t> members; ///< indices into the constructor's shards
    std::vector<at::Tensor> params;
    std::vector<at::Tensor> steps; ///< float32 scalars, Adam and AdamW only
    std::vector<at::Tensor> expAvgs;
    std::vector<at::Tensor> expAvgSqs;
    std::vector<at::Tensor> maxExpAvgSqs; ///< amsgrad only
    std::vector<at::Tensor> momenta;      ///< SGD with momentum only
    /// Of each of momenta: how many updates there were when it had none yet.
    std::vector<int64_t> momentumBegins;
    std::unique_ptr<OptimizerPlugin> plugin;
    std::vector<std::vector<at::Tensor>> pluginStates; ///< of each member
  };

  /// The places of a member's state in its group.
  static std::vector<std::pair<std::string, at::Tensor *>>
  stateOf(Group &group, size_t member);
  /// The group of a shard and its index there; null for an empty shard.
  std::pair<Group *, size_t> find(size_t shard);
  std::unique_ptr<OptimizerPlugin> createPlugin(size_t settings) const;
  void addState(Group &group, const at::Tensor &shard) const;
  void stepAdam(Group &group, const std::vector<at::Tensor> &grads, double lr,
                const Scaling &scaling);
  void stepAdamForeach(Group &group, std::vector<at::Tensor> grads, double lr);
  void stepSGD(Group &group, const std::vector<at::Tensor> &grads, double lr,
               const Scaling &scaling);
  /// Whether the next update makes the gradient the member's momentum.
  bool begins(const Group &group, size_t member) const;
  /// The same of all members. Throws InputError if it differs, which torch's
  /// fused kernel does not take.
  bool allBegin(const Group &group) const;
  void updateMomentum(Group &group, size_t member,
                      const at::Tensor &grad) const;
  void stepSGDForeach(Group &group, std::vector<at::Tensor> grads, double lr);
  void stepPlugin(Group &group, const std::vector<at::Tensor> &grads,
                  double lr);

  std::vector<plan::Optimizer> settings;
  /// Outlives the groups' plug-ins.
  std::optional<OptimizerLibrary> library;
  std::vector<at::Tensor> shards;
  std::vector<int32_t> groupOf; ///< of the constructor
  std::vector<Group> groups;
  int64_t stepsDone = 0;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_OPTIMIZER_SHARDEDOPTIMIZER_H
