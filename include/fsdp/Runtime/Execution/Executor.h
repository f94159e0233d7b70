//===- Executor.h - runs the steps of a plan ------------------------------===//
//
// Decides when instructions run: in which stream, microbatch and graph. The
// Interpreter defines what they do.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_EXECUTION_EXECUTOR_H
#define FSDP_RUNTIME_EXECUTION_EXECUTOR_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Collectives/Comm.h"
#include "fsdp/Runtime/Devices/Device.h"
#include "fsdp/Runtime/Devices/Streams.h"
#include "fsdp/Runtime/Execution/Interpreter.h"
#include "fsdp/Runtime/Execution/Profiler.h"
#include "fsdp/Runtime/Execution/StepGraphs.h"
#include "fsdp/Runtime/Execution/StepTrace.h"
#include "fsdp/Runtime/Memory/RankArena.h"
#include "fsdp/Runtime/Operators/CallTable.h"
#include "fsdp/Runtime/Position.h"

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
struct StepResult : UpdateResult {
  double loss = 0; ///< mean over the microbatches
  /// How long the host took to submit the step, on a device that executes it
  /// asynchronously.
  std::optional<double> hostSeconds;
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

  /// The settings of each of the plan's parameter groups; the first is
  /// Plan::optimizer.
  std::vector<plan::Optimizer> optimizerSettings() const;
  /// As ShardedOptimizer::setSettings.
  void setOptimizerSettings(const std::vector<plan::Optimizer> &changed);

  /// As Interpreter::shardedOptimizer.
  ShardedOptimizer *shardedOptimizer() const {
    return interpreter.shardedOptimizer();
  }
  /// As Interpreter::gradScaler.
  GradScaler *gradScaler() { return interpreter.gradScaler(); }
  /// As Interpreter::setPublishes; without it the caller publishes before each
  /// step and evaluation.
  void setPublishes(bool value) { interpreter.setPublishes(value); }
  /// As Interpreter::setStage; not with graphs.
  void setStage(Interpreter::Stage value) {
    interpreter.setStage(std::move(value));
  }
  /// As Interpreter::setBuffer.
  void setBuffer(size_t buffer, const at::Tensor &tensor) {
    interpreter.setBuffer(buffer, tensor);
  }
  /// As Interpreter::takeGradients.
  Interpreter::Gradients takeGradients() { return interpreter.takeGradients(); }

  const RankArena &memory() const { return arena; }

  /// Captures the step in graphs of the device from step StepGraphs::kWarmup
  /// on. Not with a profiler or a trace. Call it before the first step.
  void useGraphs() { graphs.emplace(plan, device); }
  const std::optional<StepGraphs> &stepGraphs() const { return graphs; }

  void setFault(const Fault &value) { fault = value; }
  /// Measures the instructions of steps from now on; null: none. Borrowed.
  void setProfiler(Profiler *value) { profiler = value; }
  /// Takes the times of steps from now on; each step replaces the one before.
  /// Null: none. Borrowed.
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

  /// Submits instructions [begin, end) to their streams.
  void submit(Program &program, size_t begin, size_t end);
  /// Executes instructions [begin, end) of this microbatch, and joins streams.
  void runPart(size_t begin, size_t end);
  /// Executes this microbatch, all streams joined.
  void runMicrobatch();
  /// A live value that instructions from `begin` on use, and that lies neither
  /// in the arena nor at a place on the host; -1 if there is none.
  plan::ValueId unplaced(size_t begin) const;
  /// Throws RunError if a captured microbatch would not find its inputs where
  /// they were.
  void checkInputs(const Interpreter::HostState &state);
  void nameRanges(Program &program);
  /// Ends the device's open range and begins another; -1: none.
  void enterRange(int32_t range);
  /// Executes one instruction, on its stream.
  Wait execute(Program &program, size_t index);
  /// The position of a program's instruction in the plan; the evaluation's
  /// instructions are numbered after the step's.
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

  const plan::Plan &plan;
  Comm &comm;
  Device &device;
  Position &position;
  /// Outlives the values.
  RankArena arena;
  Interpreter interpreter;
  Program training, evaluation;
  /// The first instruction of the optimizer phase.
  size_t optimizerBegin = 0;
  int64_t step = 0;
  std::optional<StepGraphs> graphs;
  /// What a captured segment of the last microbatch leaves to the next.
  std::vector<at::Tensor> carried;
  /// By microbatch: where its inputs lay at capture.
  std::vector<std::vector<const void *>> capturedInputs;
  std::vector<std::string> rangeNames;
  int32_t openRange = -1;
  /// On the device, read only after the step: the sum of its microbatches'
  /// losses and the last of them, in float64.
  at::Tensor lossSum, lossTerm;
  std::optional<Fault> fault;
  Profiler *profiler = nullptr;
  StepTrace *trace = nullptr;
  /// Declared last: destroyed before what its threads use.
  std::unique_ptr<Streams> streams;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_EXECUTION_EXECUTOR_H
