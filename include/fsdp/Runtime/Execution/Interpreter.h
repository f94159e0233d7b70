//===- Interpreter.h - what each kind of instruction does -----------------===//
//
// The state of a rank's program (values, gathered parameters, optimizer), and
// what an instruction does to it. The Executor decides when instructions run.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_EXECUTION_INTERPRETER_H
#define FSDP_RUNTIME_EXECUTION_INTERPRETER_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Collectives/Comm.h"
#include "fsdp/Runtime/Devices/Device.h"
#include "fsdp/Runtime/Devices/Streams.h"
#include "fsdp/Runtime/Memory/HostStore.h"
#include "fsdp/Runtime/Operators/CallTable.h"
#include "fsdp/Runtime/Operators/KernelTable.h"
#include "fsdp/Runtime/Optimizer/GradScaler.h"
#include "fsdp/Runtime/Optimizer/ShardedOptimizer.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace fsdp::runtime {

/// What the optimizer phase of a step did.
struct UpdateResult {
  double learningRate = 0; ///< of the parameters that are in no other group
  /// Total norm of the gradients, where the plan clips them.
  std::optional<double> gradNorm;
  /// What the loss was multiplied by, where the plan has a gradient scaler.
  std::optional<double> lossScale;
  /// A gradient was not finite: no parameter changed.
  bool skipped = false;
  /// The first parameter with a gradient that is not finite, in the first step
  /// that has one, or -1. Only this rank's shards are checked, on the CPU, and
  /// only without a gradient scaler, which looks for such gradients itself.
  int64_t badGradient = -1;
};

class Interpreter {
public:
  using Wait = Streams::Wait;

  /// Borrows plan, comm and device. `buffers` are this rank's, in the plan's
  /// order, on the device; calls may mutate them.
  Interpreter(const plan::Plan &plan, Comm &comm, Device &device,
              std::vector<at::Tensor> buffers);

  /// Executes the instruction at `index` of the program of `calls`, except its
  /// frees. Returns the wait for a collective that it has only begun, which it
  /// does on streams other than the compute stream. What operators and
  /// collectives throw passes through.
  Wait execute(const plan::Instruction &instruction, CallTable &calls,
               size_t index);
  /// Skips an instruction that does not run in this microbatch: the results of
  /// a gather are those that the previous microbatch kept.
  void leaveOut(const plan::Instruction &instruction);

  /// Called around the instructions of a step, counted from 0; the end is
  /// called when all of them have ended.
  void beginStep(int64_t step);
  UpdateResult endStep();
  /// Before the instructions of a microbatch of the step, counted from 0.
  void beginMicrobatch(int64_t number);
  int64_t currentMicrobatch() const { return microbatch; }
  bool isLastMicrobatch() const {
    return microbatch == plan.accumulationSteps - 1;
  }

  /// By value id; undefined where there is none.
  std::vector<at::Tensor> values;

  /// The tensors that instructions hand to each other on the host.
  struct HostState {
    std::vector<at::Tensor> values;
    std::vector<std::vector<at::Tensor>> gathered;
  };
  /// The tensors as they are now, without ownership: their places remain the
  /// plan's.
  HostState aliasState() const;
  void restoreState(const HostState &state);

  /// Whether the update ends with Comm::publish, which is the default.
  void setPublishes(bool value) { publishes = value; }
  /// Begins to copy a unit's state (plan::StageState), and returns the wait for
  /// the copies. It is called on the stream of the instruction.
  using Stage = std::function<Wait(int32_t unit)>;
  /// Null: nothing is copied, which is the default. Between steps.
  void setStage(Stage value) { stage = std::move(value); }
  /// Takes a buffer of the plan in place of the one that is there.
  void setBuffer(size_t buffer, const at::Tensor &tensor) {
    buffers[buffer] = tensor;
  }
  /// By the index of their parameter.
  using Gradients = std::vector<std::pair<int32_t, at::Tensor>>;
  /// With an external optimizer: the last step's gradients, this rank's shards.
  /// The caller owns them; there are none after a step that a gradient scaler
  /// skips.
  Gradients takeGradients() { return std::exchange(gradients, {}); }

  /// Null for a plan that updates nothing itself. The optimizer's shards are
  /// those of the plan's optimizer_step.
  ShardedOptimizer *shardedOptimizer() const { return optimizer.get(); }
  /// Null for a plan without one.
  GradScaler *gradScaler() { return scaler ? &*scaler : nullptr; }
  const HostStore &hostStore() const { return host; }

private:
  void run(CallTable &calls, const plan::Call &call, size_t index);
  /// Collectives return the wait for them.
  Wait run(const plan::AllGather &gather);
  Wait run(const plan::ReduceScatter &reduce, plan::ValueId buffer);
  Wait run(const plan::AllReduce &reduce, plan::ValueId buffer);
  void run(const plan::Reshard &reshard, plan::ValueId buffer);
  void run(const plan::Accumulate &accumulate);
  void run(const plan::Unscale &unscale);
  void run(const plan::ClipGradNorm &clip);
  void run(const plan::OptimizerStep &step);
  void watchGradients(const plan::OptimizerStep &step);
  void createOptimizer(const plan::OptimizerStep &step);
  /// Makes the tensors that takeGradients returns.
  void allocateGradients();
  /// Writes them.
  void handOutGradients(const plan::OptimizerStep &step, bool areFinite);
  /// Memory of an instruction's buffer; an undefined tensor for -1.
  at::Tensor makeBuffer(plan::ValueId buffer);
  std::vector<at::Tensor> take(const std::vector<plan::ValueId> &ids) const;
  /// Tell ThreadSanitizer what the instruction accesses.
  void annotateOperands(const plan::Instruction &instruction) const;
  void annotateResults(const plan::Instruction &instruction) const;

  const plan::Plan &plan;
  Comm &comm;
  Device &device;
  std::vector<at::Tensor> buffers;
  HostStore host;
  KernelTable kernels;
  std::unique_ptr<ShardedOptimizer> optimizer;
  std::optional<GradScaler> scaler;
  bool publishes = true;
  Stage stage;
  Gradients gradients;
  /// Per unit: its parameters while they are gathered.
  std::vector<std::vector<at::Tensor>> gathered;
  int64_t microbatch = 0;
  double lrFactor = 1;
  int64_t updatesBefore = 0;
  /// UpdateResult::badGradient of this step, and whether there has been one so
  /// far.
  int64_t badGradient = -1;
  bool sawBadGradient = false;
  /// The optimizer divides the gradients by the loss scale.
  bool unscaleDeferred = false;
  /// On the device, read only after the step: the norm of its gradients.
  /// Undefined where the plan does not clip.
  at::Tensor gradNorm;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_EXECUTION_INTERPRETER_H
