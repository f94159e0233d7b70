//===- Executor.cpp - runs the steps of a plan ----------------------------===//
#include "fsdp/Runtime/Execution/Executor.h"
#include "fsdp/Plan/Operands.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Memory/Layout.h"

#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/InferenceMode.h>

#include <chrono>
#include <csignal>
#include <map>
#include <utility>

#include <unistd.h>

namespace fsdp::runtime {

/// Of no losses: with 0.0 the mean of -0.0 would be 0.0.
static constexpr double kEmptySum = -0.0;

Executor::Executor(const plan::Plan &plan, Comm &comm, Device &device,
                   Position &position, std::vector<at::Tensor> buffers,
                   std::unique_ptr<Streams> streams)
    : plan(plan), comm(comm), device(device), position(position),
      arena(plan, comm.shardIndex(), device),
      interpreter(plan, comm, device, std::move(buffers)),
      training(plan, plan.instructions, device.where()),
      evaluation(plan, plan.evaluation, device.where()),
      streams(std::move(streams)) {
  c10::InferenceMode guard;
  lossSum = at::zeros({}, at::dtype(at::kDouble).device(device.where()));
  lossTerm = at::zeros_like(lossSum);
  nameRanges(training);
  nameRanges(evaluation);
  for (size_t i = 0; i < plan.instructions.size(); ++i)
    if (plan.instructions[i].phase != plan::Phase::Optimizer)
      optimizerBegin = i + 1;
}

Executor::Program::Program(const plan::Plan &plan,
                           const std::vector<plan::Instruction> &instructions,
                           c10::Device device)
    : instructions(instructions), calls(plan, instructions, device),
      onHost(&instructions == &plan.instructions
                 ? plan::computesOnHost(plan)
                 : std::vector<bool>(instructions.size())) {}

void Executor::nameRanges(Program &program) {
  std::map<std::string, int32_t> ids;
  for (size_t i = 0; i < rangeNames.size(); ++i)
    ids[rangeNames[i]] = int32_t(i);
  for (const plan::Instruction &instruction : program.instructions) {
    std::string name = &program == &evaluation
                           ? "evaluation"
                           : std::string(plan::phaseName(instruction.phase));
    int32_t unit = plan::unitOfInstruction(plan, instruction);
    if (unit != -1)
      name += " " + plan.units[size_t(unit)].name;
    auto [entry, isNew] = ids.emplace(name, int32_t(rangeNames.size()));
    if (isNew)
      rangeNames.push_back(name);
    program.ranges.push_back(entry->second);
  }
}

Executor::~Executor() = default;

Executor::Wait Executor::execute(Program &program, size_t index) {
  const plan::Instruction &instruction = program.instructions[index];
  c10::InferenceMode guard;
  size_t site = positionOf(program, index);
  position.instruction.store(int64_t(site), std::memory_order_relaxed);
  injectFault(site);
  if (&program == &training &&
      !plan::runsIn(plan, instruction, interpreter.currentMicrobatch())) {
    interpreter.leaveOut(instruction);
    return {};
  }
  RankArena::Scope scope(arena, site);
  Wait begun = interpreter.execute(instruction, program.calls, index);
  arena.settle(interpreter.values);
  for (plan::ValueId value : instruction.frees)
    interpreter.values[value].reset();
  return begun;
}

void Executor::injectFault(size_t index) const {
  if (!fault || fault->rank != comm.rank() || fault->step != step + 1 ||
      fault->instruction != int64_t(index))
    return;
  if (fault->kill)
    kill(getpid(), SIGKILL);
  throw RunError("injected fault");
}

template <typename RunT>
auto Executor::naming(const Program &program, size_t index, RunT run) const
    -> decltype(run()) {
  auto describe = [&](const std::string &message) {
    return RunError("step " + std::to_string(step + 1) + ": " +
                    (&program == &evaluation ? "evaluation: " : "") +
                    describeInstruction(plan, program.instructions[index]) +
                    ": " + firstLine(message));
  };
  try {
    return run();
  } catch (const AbortedError &) {
    throw;
  } catch (const PeerLostError &) {
    throw;
  } catch (const c10::Error &error) {
    throw describe(error.what_without_backtrace());
  } catch (const std::exception &error) {
    throw describe(error.what());
  }
}

void Executor::enterRange(int32_t range) {
  if (range == openRange)
    return;
  if (openRange != -1)
    device.endRange();
  openRange = range;
  if (range != -1)
    device.beginRange(rangeNames[size_t(range)].c_str());
}

void Executor::submit(Program &program, size_t begin, size_t end) {
  for (size_t i = begin; i < end; ++i) {
    const plan::Instruction &instruction = program.instructions[i];
    enterRange(program.ranges[i]);
    bool measures =
        profiler && &program == &training &&
        plan::runsIn(plan, instruction, interpreter.currentMicrobatch());
    if (measures) {
      device.synchronize();
      profiler->begin();
    }
    StepTrace *traced = &program == &training ? trace : nullptr;
    auto markBegin = [traced, i, m = interpreter.currentMicrobatch()] {
      if (traced)
        traced->begin(m, i);
    };
    auto markEnd = [traced, i, m = interpreter.currentMicrobatch()] {
      if (traced)
        traced->end(m, i);
    };
    if (program.onHost[i])
      streams->awaitOnHost(instruction.stream, instruction.waits);
    streams->submit(
        instruction.stream, instruction.waits, instruction.records,
        [this, &program, i, markBegin, markEnd]() -> Wait {
          markBegin();
          Wait begun = naming(program, i, [&] { return execute(program, i); });
          if (!begun) {
            markEnd();
            return {};
          }
          return [this, &program, i, markEnd, begun = std::move(begun)] {
            naming(program, i, begun);
            markEnd();
          };
        });
    if (measures) {
      device.synchronize();
      profiler->end(i);
    }
  }
  enterRange(-1);
}

StepResult Executor::runStep(int64_t newStep, const Inputs &inputs) {
  c10::InferenceMode guard;
  if (trace)
    trace->beginStep();
  auto begin = std::chrono::steady_clock::now();
  step = newStep;
  comm.beginStep(step);
  position.step.store(step, std::memory_order_relaxed);
  interpreter.beginStep(step);
  compute([this] { lossSum.fill_(kEmptySum); });
  for (int64_t number = 0; number < plan.accumulationSteps; ++number) {
    interpreter.beginMicrobatch(number);
    bindInputs(arena.stepInputs(), inputs, number);
    if (graphs)
      streams->synchronize(); // a graph follows the thread's own stream
    runMicrobatch();
  }
  StepResult result;
  if (!device.where().is_cpu())
    result.hostSeconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin)
            .count();
  compute([&] {
    result.loss = lossSum.item<double>() / double(plan.accumulationSteps);
    for (at::Tensor &value : interpreter.values)
      value.reset();
  });
  streams->synchronize();
  static_cast<UpdateResult &>(result) = interpreter.endStep();
  arena.endProgram();
  if (trace)
    trace->endStep();
  return result;
}

void Executor::compute(std::function<void()> work) {
  streams->submit(plan::Stream::Compute, {}, -1,
                  [work = std::move(work)]() -> Wait {
                    c10::InferenceMode guard;
                    work();
                    return {};
                  });
}

void Executor::addLoss(plan::ValueId loss) {
  // Added in another dtype, it would be copied to memory from the heap.
  lossTerm.copy_(interpreter.values[loss].reshape({}));
  lossSum.add_(lossTerm);
}

void Executor::runPart(size_t begin, size_t end) {
  submit(training, begin, end);
  if (begin == 0)
    compute([this] { addLoss(plan.loss); });
  streams->synchronize();
}

void Executor::runMicrobatch() {
  if (!graphs)
    return runPart(0, interpreter.isLastMicrobatch() ? plan.instructions.size()
                                                     : optimizerBegin);
  int64_t microbatch = interpreter.currentMicrobatch();
  Interpreter::HostState before = interpreter.aliasState();
  checkInputs(before);
  std::vector<StepGraphs::Segment *> segments = graphs->segmentsOf(microbatch);
  for (StepGraphs::Segment *segment : segments) {
    StepGraphs::Outcome outcome = graphs->run(
        *segment, microbatch,
        [this, begin = segment->begin, end = segment->end] {
          runPart(begin, end);
        },
        [&] { interpreter.restoreState(before); });
    if (segment == segments.back())
      break;
    // What the next segment uses from this one: a replay hands the host
    // nothing.
    if (outcome == StepGraphs::Outcome::Captured) {
      carried = interpreter.aliasState().values;
      if (plan::ValueId value = unplaced(segment->end); value != -1)
        graphs->abandon("the optimizer takes value " + std::to_string(value) +
                        ", which lies outside the arena");
    }
    if (outcome == StepGraphs::Outcome::Replayed)
      interpreter.values = carried;
    before = interpreter.aliasState();
  }
}

plan::ValueId Executor::unplaced(size_t begin) const {
  const std::byte *arenaBegin = arena.deviceMemory()->base();
  for (size_t i = begin; i < plan.instructions.size(); ++i)
    for (plan::ValueId value : plan::getOperands(plan.instructions[i])) {
      const at::Tensor &tensor = interpreter.values[value];
      if (!tensor.defined() || tensor.numel() == 0)
        continue;
      auto *data = static_cast<const std::byte *>(tensor.const_data_ptr());
      bool isInArena = data >= arenaBegin && data < arenaBegin + arena.bytes();
      if (!isInArena && !interpreter.hostStore().holds(data))
        return value;
    }
  return -1;
}

void Executor::checkInputs(const Interpreter::HostState &state) {
  capturedInputs.resize(size_t(plan.accumulationSteps));
  std::vector<const void *> places;
  for (const plan::Input &input : plan.inputs)
    places.push_back(state.values[input.value].const_data_ptr());
  int64_t microbatch = interpreter.currentMicrobatch();
  std::vector<const void *> &before = capturedInputs[size_t(microbatch)];
  if (graphs->isCaptured(microbatch) && places != before)
    throw RunError(
        "step " + std::to_string(step + 1) +
        ": the inputs are at other addresses than when the step was captured");
  before = std::move(places);
}

void Executor::bindInputs(RankArena::Site site, const Inputs &inputs,
                          int64_t number) {
  compute([this, site, &inputs, number] {
    RankArena::Scope scope(arena, site);
    std::vector<at::Tensor> &values = interpreter.values;
    for (const plan::Input &input : plan.inputs)
      values[input.value].reset();
    std::vector<at::Tensor> batch = inputs(number);
    for (size_t i = 0; i < batch.size(); ++i)
      values[plan.inputs[i].value] =
          laidOut(batch[i], plan.inputs[i].strides, device.where());
    arena.settle(values);
  });
}

double Executor::evaluate(const Inputs &inputs) {
  c10::InferenceMode guard;
  bindInputs(arena.evaluationInputs(), inputs, 0);
  compute([this] { lossSum.fill_(kEmptySum); });
  submit(evaluation, 0, plan.evaluation.size());
  double loss = 0;
  compute([&] {
    addLoss(plan.evaluationLoss);
    loss = lossSum.item<double>();
    for (at::Tensor &value : interpreter.values)
      value.reset();
  });
  streams->synchronize();
  arena.endProgram();
  return loss;
}

std::vector<plan::Optimizer> Executor::optimizerSettings() const {
  const ShardedOptimizer *optimizer = interpreter.shardedOptimizer();
  return optimizer ? optimizer->currentSettings() : plan.optimizerGroups();
}

void Executor::setOptimizerSettings(
    const std::vector<plan::Optimizer> &changed) {
  ShardedOptimizer *optimizer = interpreter.shardedOptimizer();
  if (!optimizer || changed == optimizer->currentSettings())
    return;
  optimizer->setSettings(changed);
  if (graphs)
    useGraphs(); // those that exist have the old ones
}

} // namespace fsdp::runtime
