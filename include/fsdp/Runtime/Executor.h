//===- Executor.h - runs a plan's instructions ----------------------------===//
//
// Everything that can be looked up is looked up once, in a CallTable. A step
// then pushes arguments onto one reused stack and calls the boxed kernels.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_EXECUTOR_H
#define FSDP_RUNTIME_EXECUTOR_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/CallTable.h"
#include "fsdp/Runtime/Comm.h"
#include "fsdp/Runtime/Device.h"
#include "fsdp/Runtime/GradScaler.h"
#include "fsdp/Runtime/HostStore.h"
#include "fsdp/Runtime/Position.h"
#include "fsdp/Runtime/Profiler.h"
#include "fsdp/Runtime/RankArena.h"
#include "fsdp/Runtime/ShardedOptimizer.h"
#include "fsdp/Runtime/StepGraphs.h"
#include "fsdp/Runtime/StepTrace.h"
#include "fsdp/Runtime/Streams.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::runtime {

/// A failure made on purpose, for tests of what follows.
struct Fault {
  int64_t rank = 0;
  int64_t step = 0;        ///< counted from 1
  int64_t instruction = 0; ///< position in the plan
  bool kill = false;       ///< SIGKILL to itself; otherwise an exception
};

/// What one rank knows after a step.
struct StepResult {
  double loss = 0;         ///< mean over the microbatches
  double learningRate = 0; ///< of the parameters without a group of their own
  /// Total norm of the gradients, where the plan clips them.
  std::optional<double> gradNorm;
  /// What the loss was multiplied by, where the plan has a gradient scaler.
  std::optional<double> lossScale;
  /// Until the host had submitted the step, on a device that executes it by
  /// itself.
  std::optional<double> hostSeconds;
  /// A gradient was not finite: no parameter changed.
  bool skipped = false;
  /// The first parameter with a gradient that is not finite, in the first step
  /// that has one, or -1. Of this rank's shards, on the CPU and without a
  /// gradient scaler, which looks for them itself.
  int64_t badGradient = -1;
};

class Executor {
public:
  /// The inputs of a microbatch of the step, in the plan's order.
  using Inputs = std::function<std::vector<at::Tensor>(int64_t microbatch)>;

  /// Borrows plan, comm, device and position; resolves every instruction.
  /// `buffers` are this rank's, in the plan's order, on the device; calls may
  /// mutate them. Throws InputError that names an instruction whose operator is
  /// unknown or whose arguments do not fit its schema.
  Executor(const plan::Plan &plan, Comm &comm, Device &device,
           Position &position, std::vector<at::Tensor> buffers,
           std::unique_ptr<Streams> streams);
  ~Executor();

  /// Runs one step, counted from 0: forward and backward on the inputs of each
  /// microbatch, then the optimizer phase. Throws RunError that names step,
  /// operator, module and unit; errors of the collectives pass through.
  StepResult runStep(int64_t step, const Inputs &inputs);

  /// The loss of one batch, inputs(0), by the plan's evaluation, which it must
  /// have; call it between steps, on all ranks alike. Changes buffers only
  /// where the model does in eval mode. Throws as runStep does.
  double evaluate(const Inputs &inputs);

  /// Of each of the plan's parameter groups, the first being Plan::optimizer.
  std::vector<plan::Optimizer> optimizerSettings() const;
  /// As ShardedOptimizer::setSettings.
  void setOptimizerSettings(const std::vector<plan::Optimizer> &changed);

  /// Null for a plan that updates nothing. Its shards are those of the plan's
  /// optimizer_step.
  ShardedOptimizer *shardedOptimizer() { return optimizer.get(); }

  const RankArena &memory() const { return arena; }

  /// Captures the step in graphs of the device from step StepGraphs::kWarmup
  /// on. Not with a profiler or a trace. Call it before the first step.
  void useGraphs() { graphs.emplace(plan, device); }
  const std::optional<StepGraphs> &stepGraphs() const { return graphs; }

  void setFault(const Fault &value) { fault = value; }
  /// Measures the instructions of steps from now on; null: none. Borrowed.
  void setProfiler(Profiler *value) { profiler = value; }
  /// Takes the times of steps from now on, of each in place of the one before;
  /// null: none. Borrowed.
  void setTrace(StepTrace *value) { trace = value; }

private:
  /// A list of the plan's instructions.
  struct Program {
    Program(const plan::Plan &plan,
            const std::vector<plan::Instruction> &instructions,
            c10::Device device);

    const std::vector<plan::Instruction> &instructions;
    CallTable calls;
    /// Per instruction: its phase and unit, an index into rangeNames.
    std::vector<int32_t> ranges;
    /// Per instruction: plan::computesOnHost.
    std::vector<bool> onHost;
  };
  using Wait = Streams::Wait;

  void run(CallTable &calls, const plan::Call &call, size_t index);
  /// Collectives return the wait for them, empty where they do not run in this
  /// microbatch.
  Wait run(const plan::AllGather &gather);
  Wait run(const plan::ReduceScatter &reduce, plan::ValueId buffer);
  Wait run(const plan::AllReduce &reduce, plan::ValueId buffer);
  void run(const plan::Reshard &reshard, plan::ValueId buffer);
  /// Memory of an instruction's buffer; an undefined tensor for -1.
  at::Tensor makeBuffer(plan::ValueId buffer);
  void run(const plan::Accumulate &accumulate);
  void run(const plan::Unscale &unscale);
  void run(const plan::ClipGradNorm &clip);
  void run(const plan::CopyToHost &copy);
  void run(const plan::OptimizerStep &step);
  void watchGradients(const plan::OptimizerStep &step);
  void createOptimizer(const plan::OptimizerStep &step);
  bool isLastMicrobatch() const {
    return microbatch == plan.accumulationSteps - 1;
  }
  /// Submits instructions [begin, end) to their streams.
  void submit(Program &program, size_t begin, size_t end);
  /// Executes instructions [begin, end) of this microbatch, and joins streams.
  void runPart(size_t begin, size_t end);
  /// Executes this microbatch, all streams joined.
  void runMicrobatch();
  /// The tensors that instructions hand to each other on the host.
  struct HostState {
    std::vector<at::Tensor> values;
    std::vector<std::vector<at::Tensor>> gathered;
    std::vector<at::Tensor> sums;
  };
  /// As they are now, none of them an owner: their places stay the plan's.
  HostState aliasState() const;
  void restoreState(const HostState &state);
  /// A value that is there, which instructions from `begin` on take, and that
  /// lies neither in the arena nor at a place on the host; -1 if there is none.
  plan::ValueId unplaced(size_t begin) const;
  /// Throws RunError where a microbatch that is captured would not find its
  /// inputs.
  void checkInputs(const HostState &state);
  void nameRanges(Program &program);
  /// Ends the device's range that is open and begins another, -1: none.
  void enterRange(int32_t range);
  /// Tell ThreadSanitizer what the instruction accesses.
  void annotateOperands(const plan::Instruction &instruction) const;
  void annotateResults(const plan::Instruction &instruction) const;
  /// Executes one, on its stream.
  Wait execute(Program &program, size_t index);
  /// The position of a program's instruction in the plan: those of the
  /// evaluation are counted on from the step's.
  size_t positionOf(const Program &program, size_t index) const {
    return &program == &evaluation ? plan.instructions.size() + index : index;
  }
  /// Calls `run`; its errors name the instruction.
  template <typename RunT>
  auto naming(const Program &program, size_t index, RunT run) const
      -> decltype(run());
  /// Binds the inputs of a microbatch to their values.
  void bindInputs(RankArena::Site site, const Inputs &inputs,
                  int64_t microbatch);
  /// Submits `work` to the compute stream.
  void compute(std::function<void()> work);
  /// Adds the value to `lossSum`.
  void addLoss(plan::ValueId loss);
  void injectFault(size_t position) const;
  std::vector<at::Tensor> take(const std::vector<plan::ValueId> &ids) const;

  const plan::Plan &plan;
  Comm &comm;
  Device &device;
  Position &position;
  std::vector<at::Tensor> buffers;
  /// Outlives the values.
  RankArena arena;
  HostStore host;
  std::vector<at::Tensor> values;
  Program training, evaluation;
  std::unique_ptr<ShardedOptimizer> optimizer;
  std::optional<GradScaler> scaler;
  /// The optimizer divides the gradients by the loss scale.
  /// StepResult::badGradient of this step, and whether there was one.
  int64_t badGradient = -1;
  bool sawBadGradient = false;
  bool unscaleDeferred = false;
  /// The first instruction of the optimizer phase.
  size_t optimizerBegin = 0;
  /// Per unit: its parameters while they are gathered.
  std::vector<std::vector<at::Tensor>> gathered;
  /// Per parameter: the sum over the step's microbatches so far.
  std::vector<at::Tensor> sums;
  int64_t step = 0;
  int64_t microbatch = 0;
  std::optional<StepGraphs> graphs;
  /// What a captured segment of the last microbatch leaves to the next.
  std::vector<at::Tensor> carried;
  /// By microbatch: where its inputs lay.
  std::vector<std::vector<const void *>> capturedInputs;
  std::vector<std::string> rangeNames;
  int32_t openRange = -1;
  double lrFactor = 1;
  /// On the device, read only after the step: the sum of its microbatches'
  /// losses and the last of them, in float64; the norm of its gradients.
  at::Tensor lossSum, lossTerm, gradNorm;
  /// The plan clips.
  bool clips = false;
  std::optional<Fault> fault;
  Profiler *profiler = nullptr;
  StepTrace *trace = nullptr;
  /// Ends before what its threads use.
  std::unique_ptr<Streams> streams;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_EXECUTOR_H
