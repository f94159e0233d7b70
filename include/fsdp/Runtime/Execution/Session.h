//===- Session.h - one rank of an open plan -------------------------------===//
//
// What a run from files (Trainer.h) and a Python process share: initial values,
// steps, and the parameters in between. The process has the steered allocator
// (SteeredAllocator.h). First `load`, `initialise` or writes of the caller for
// every parameter and buffer, then `start`, then steps.
//
// All calls come from one thread per rank. Those marked collective are made by
// all ranks, in the same order.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_EXECUTION_SESSION_H
#define FSDP_RUNTIME_EXECUTION_SESSION_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Execution/Executor.h"
#include "fsdp/Runtime/Files/WeightFiles.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::runtime {

class Session {
public:
  /// Borrows all but the settings. The plan must come from openPlan, or have no
  /// plug-in.
  Session(const plan::Plan &plan, Comm &comm, Device &device,
          Position &position, const StreamSettings &streams = {});

  Comm &comm() { return communication; }
  /// Where others see how far this rank is.
  Position &progress() { return position; }
  /// After start.
  Executor &executor() { return *program; }
  const Executor &executor() const { return *program; }
  /// This rank's, in the plan's order.
  const std::vector<at::Tensor> &buffers() const { return ownBuffers; }

  /// Takes this rank's rows of every parameter, and those buffers that the
  /// weights have. Throws InputError for a tensor that is missing or differs
  /// from the plan's.
  void load(const WeightFiles &weights);
  /// Runs the model's own initialisation.
  void initialise(uint64_t seed);
  /// Makes the initial values available to all ranks, and the optimizer.
  void start();

  /// Lets the caller write parameters between steps: each rank's writes become
  /// visible to all ranks when the next step or evaluation begins, not when a
  /// step ends. After start.
  void setCallerWrites();

  /// Runs the next step; a collective. An exception ends the session.
  StepResult step(const Executor::Inputs &inputs);
  /// Executor::evaluate; a collective.
  double evaluate(const Executor::Inputs &inputs);
  /// Takes a tensor of the plan's shape, dtype and strides as a buffer; steps
  /// write it. Throws InputError for another one.
  void bindBuffer(int32_t buffer, const at::Tensor &tensor);
  /// ShardedOptimizer::bindState; does nothing for a parameter that is not
  /// updated. After start.
  void bindOptimizerState(int32_t param,
                          const ShardedOptimizer::NamedTensors &state);

  /// The optimizer's state of a parameter (ShardedOptimizer::state); empty for
  /// one that is not updated. After start.
  ShardedOptimizer::NamedTensors optimizerState(int32_t param);
  /// Steps so far: learning-rate schedules and plug-ins depend on it.
  int64_t steps() const { return stepsDone; }
  /// Continues as if `steps` steps had been done. After start.
  void setSteps(int64_t steps);

  /// Waits until no rank reads or writes the parameters. Collective.
  void quiesce();
  /// The whole parameter, to be read until the next step or quiesce; that of an
  /// ignored parameter is this rank's. Collective.
  at::Tensor fullParam(int32_t param);

private:
  std::unique_ptr<Streams> makeStreams();
  /// The optimizer's index of a parameter that it updates.
  std::optional<size_t> shardOf(int32_t param) const;

  const plan::Plan &plan;
  Comm &communication;
  Device &device;
  Position &position;
  StreamSettings streams;
  std::vector<at::Tensor> ownBuffers;
  std::optional<Executor> program;
  int64_t stepsDone = 0;
  bool callerWrites = false;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_EXECUTION_SESSION_H
