//===- Executor.cpp - runs a plan's instructions --------------------------===//
#include "fsdp/Runtime/Executor.h"
#include "AccessAnnotations.h"
#include "fsdp/Plan/Operands.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Finite.h"
#include "fsdp/Runtime/GradientClipping.h"
#include "fsdp/Runtime/Layout.h"
#include "fsdp/Runtime/SteeredAllocator.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/InferenceMode.h>

#include <chrono>
#include <csignal>
#include <map>
#include <utility>

#include <unistd.h>

namespace fsdp::runtime {

Executor::Executor(const plan::Plan &plan, Comm &comm, Device &device,
                   Position &position, std::vector<at::Tensor> buffers,
                   std::unique_ptr<Streams> streams)
    : plan(plan), comm(comm), device(device), position(position),
      buffers(std::move(buffers)), arena(plan, comm.shardIndex(), device),
      host(plan, device), values(plan.values.size()),
      training(plan, plan.instructions, device.where()),
      evaluation(plan, plan.evaluation, device.where()),
      gathered(plan.units.size()), sums(plan.params.size()),
      streams(std::move(streams)) {
  c10::InferenceMode guard;
  lossSum = at::zeros({}, at::dtype(at::kDouble).device(device.where()));
  lossTerm = at::zeros_like(lossSum);
  gradNorm = at::zeros_like(lossSum);
  for (const plan::Instruction &instruction : plan.instructions)
    clips |= std::holds_alternative<plan::ClipGradNorm>(instruction.kind);
  nameRanges(training);
  nameRanges(evaluation);
  if (plan.gradScaler)
    scaler.emplace(*plan.gradScaler, device.where());
  for (size_t i = 0; i < plan.instructions.size(); ++i) {
    const plan::Instruction &instruction = plan.instructions[i];
    if (instruction.phase != plan::Phase::Optimizer)
      optimizerBegin = i + 1;
    if (const auto *step = std::get_if<plan::OptimizerStep>(&instruction.kind))
      createOptimizer(*step);
  }
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

void Executor::createOptimizer(const plan::OptimizerStep &step) {
  std::vector<at::Tensor> shards;
  for (int32_t param : step.params)
    shards.push_back(comm.shard(param));
  optimizer = std::make_unique<ShardedOptimizer>(plan.optimizerGroups(),
                                                 step.groups, shards);
}

Executor::~Executor() = default;

std::vector<at::Tensor>
Executor::take(const std::vector<plan::ValueId> &ids) const {
  std::vector<at::Tensor> result;
  result.reserve(ids.size());
  for (plan::ValueId id : ids)
    result.push_back(values[id]);
  return result;
}

void Executor::run(CallTable &calls, const plan::Call &call, size_t index) {
  // Of the microbatch before, where the plan does not free it.
  for (plan::ValueId out : call.outs)
    if (out != -1)
      values[out].reset();
  void *place =
      call.reduceInputOf >= 0 ? comm.reduceInput(call.reduceInputOf) : nullptr;
  if (!place) {
    calls.run(index, call, values);
    return;
  }
  SteerAllocation steer(
      place, size_t(plan.params[call.reduceInputOf].gradSpec().numBytes()));
  calls.run(index, call, values);
}

at::Tensor Executor::makeBuffer(plan::ValueId buffer) {
  if (buffer == -1)
    return {};
  const plan::TensorSpec &spec = plan.values[buffer];
  values[buffer].reset(); // of the microbatch before
  values[buffer] = at::empty(
      spec.shape, at::dtype(scalarType(spec.dtype)).device(device.where()));
  return values[buffer];
}

Executor::Wait Executor::run(const plan::AllGather &gather) {
  std::vector<at::Tensor> &full = gathered[gather.unit];
  Collective begun;
  if (!gather.firstMicrobatch || microbatch == 0) {
    full.clear();
    at::Tensor source;
    if (gather.source != -1)
      source = values[gather.source];
    begun = comm.allGather(gather.unit, gather.group, source);
    full = std::move(begun.results);
  }
  for (size_t i = 0; i < full.size(); ++i)
    if (gather.outs[i] >= 0)
      values[gather.outs[i]] = full[i];
  return std::move(begun.wait);
}

void Executor::run(const plan::Reshard &reshard, plan::ValueId buffer) {
  if (reshard.lastMicrobatch && !isLastMicrobatch())
    return;
  gathered[reshard.unit].clear();
  comm.reshard(reshard.unit, reshard.keep, makeBuffer(buffer));
}

Executor::Wait Executor::run(const plan::ReduceScatter &reduce,
                             plan::ValueId buffer) {
  if (reduce.lastMicrobatch && !isLastMicrobatch())
    return {};
  std::vector<at::Tensor> grads = take(reduce.ins);
  for (size_t i = 0; i < grads.size(); ++i) {
    const plan::Param &param = plan.params[reduce.params[i]];
    // The operators decide what comes out; peers would read past a tensor of
    // another size.
    const plan::TensorSpec &want = plan.values[reduce.ins[i]];
    if (!grads[i].defined() || grads[i].sizes() != want.shape ||
        grads[i].scalar_type() != scalarType(want.dtype))
      throw RunError("the gradient of \"" + param.name +
                     "\" does not have the shape and dtype that the plan says");
  }
  Collective begun = comm.reduceScatter(reduce, grads, makeBuffer(buffer));
  for (size_t i = 0; i < begun.results.size(); ++i)
    values[reduce.outs[i]] = std::move(begun.results[i]);
  return std::move(begun.wait);
}

void Executor::run(const plan::Accumulate &accumulate) {
  for (size_t i = 0; i < accumulate.params.size(); ++i) {
    at::Tensor &sum = sums[accumulate.params[i]];
    const at::Tensor &term = values[accumulate.ins[i]];
    // Other values may share the first term's storage.
    if (microbatch == 0)
      sum = term.to(scalarType(plan.values[accumulate.outs[i]].dtype),
                    /*non_blocking=*/false, /*copy=*/true,
                    at::MemoryFormat::Contiguous);
    else
      sum.add_(term);
    values[accumulate.outs[i]] = sum;
    if (isLastMicrobatch())
      sum.reset();
  }
}

void Executor::run(const plan::Unscale &unscale) {
  unscaleDeferred = unscale.deferred;
  std::vector<at::Tensor> unscaled =
      scaler->unscale(comm, take(unscale.ins), unscale.deferred);
  for (size_t i = 0; i < unscaled.size(); ++i)
    values[unscale.outs[i]] = std::move(unscaled[i]);
}

void Executor::run(const plan::ClipGradNorm &clip) {
  bool inPlace =
      !clip.outs.empty() && plan.values[clip.outs.front()].storage != -1;
  ClippedGrads clipped =
      clipGradNorm(comm, take(clip.ins), clip.maxNorm, clip.normType, inPlace);
  gradNorm.copy_(clipped.norm);
  for (size_t i = 0; i < clipped.grads.size(); ++i)
    values[clip.outs[i]] = std::move(clipped.grads[i]);
}

Executor::Wait Executor::run(const plan::AllReduce &reduce,
                             plan::ValueId buffer) {
  if (reduce.lastMicrobatch && !isLastMicrobatch())
    return {};
  Collective begun =
      comm.allReduce(reduce, take(reduce.ins), makeBuffer(buffer));
  for (size_t i = 0; i < begun.results.size(); ++i)
    values[reduce.outs[i]] = std::move(begun.results[i]);
  return std::move(begun.wait);
}

void Executor::run(const plan::CopyToHost &copy) {
  if (copy.lastMicrobatch && !isLastMicrobatch())
    return;
  host.copyGradients(copy, values);
}

void Executor::watchGradients(const plan::OptimizerStep &step) {
  if (sawBadGradient || scaler)
    return;
  for (size_t i = 0; i < step.grads.size() && !sawBadGradient; ++i)
    if (!allFinite(values[step.grads[i]])) {
      badGradient = step.params[i];
      sawBadGradient = true;
    }
}

void Executor::run(const plan::OptimizerStep &step) {
  watchGradients(step);
  comm.beginUpdate();
  ShardedOptimizer::Scaling scaling;
  if (unscaleDeferred)
    scaling.gradScale = scaler->scale();
  if (scaler && optimizer->isFused())
    scaling.foundInf = scaler->found();
  if (!scaler || scaling.foundInf || !scaler->foundInf())
    optimizer->step(take(step.grads), lrFactor, scaling);
  comm.publish();
}

void Executor::annotateOperands(const plan::Instruction &instruction) const {
  if constexpr (kThreadSanitizer) {
    for (plan::ValueId value : plan::getOperands(instruction))
      annotateRead(values[value]);
    if (const auto *call = std::get_if<plan::Call>(&instruction.kind))
      for (plan::ValueId value : call->mutates)
        annotateWrite(values[value]);
  }
}

void Executor::annotateResults(const plan::Instruction &instruction) const {
  if constexpr (kThreadSanitizer)
    if (std::holds_alternative<plan::Call>(instruction.kind))
      for (plan::ValueId value : plan::getResults(instruction))
        if (plan.values[value].storage == -1)
          annotateWrite(values[value]);
}

Executor::Wait Executor::execute(Program &program, size_t index) {
  const plan::Instruction &instruction = program.instructions[index];
  struct Visitor {
    Executor &e;
    CallTable &calls;
    size_t index;
    plan::ValueId buffer;
    Wait begun = {};
    void operator()(const plan::Call &call) { e.run(calls, call, index); }
    void operator()(const plan::ReadBuffer &read) {
      e.values[read.out] = e.buffers[read.buffer];
    }
    void operator()(const plan::Constant &constant) {
      e.values[constant.out] = calls.constant(index);
    }
    void operator()(const plan::AllGather &gather) { begun = e.run(gather); }
    void operator()(const plan::Reshard &reshard) { e.run(reshard, buffer); }
    void operator()(const plan::ReduceScatter &reduce) {
      begun = e.run(reduce, buffer);
    }
    void operator()(const plan::Accumulate &accumulate) { e.run(accumulate); }
    void operator()(const plan::LossScale &read) {
      e.values[read.out] = e.scaler->scale();
    }
    void operator()(const plan::Unscale &unscale) { e.run(unscale); }
    void operator()(const plan::ClipGradNorm &clip) { e.run(clip); }
    void operator()(const plan::OptimizerStep &step) { e.run(step); }
    // Plan::init alone has these (P13).
    void operator()(const plan::WriteParam &) {}
    void operator()(const plan::WriteBuffer &) {}
    void operator()(const plan::ReadParam &read) {
      e.values[read.out] = e.comm.shard(read.param);
    }
    void operator()(const plan::AllReduce &reduce) {
      begun = e.run(reduce, buffer);
    }
    void operator()(const plan::CopyToDevice &copy) {
      e.comm.copyToDevice(copy.unit, e.makeBuffer(buffer));
    }
    void operator()(const plan::CopyToHost &copy) { e.run(copy); }
    void operator()(const plan::OffloadActivation &offload) {
      e.host.offload(offload, e.values);
    }
    void operator()(const plan::ReloadActivation &reload) {
      e.host.reload(reload, e.values);
    }
    void operator()(const plan::Wait &) {}
  };
  c10::InferenceMode guard;
  size_t site = positionOf(program, index);
  position.instruction.store(int64_t(site), std::memory_order_relaxed);
  injectFault(site);
  RankArena::Scope scope(arena, site);
  annotateOperands(instruction);
  Visitor visitor{*this, program.calls, index, instruction.buffer};
  std::visit(visitor, instruction.kind);
  // A collective that nothing waits for, because it is awaited here.
  if (visitor.begun && instruction.stream == plan::Stream::Compute)
    std::exchange(visitor.begun, {})();
  annotateResults(instruction);
  arena.settle(values);
  for (plan::ValueId value : instruction.frees)
    values[value].reset();
  return std::move(visitor.begun);
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
  } catch (const PeerDiedError &) {
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
    bool measures = profiler && &program == &training;
    if (measures) {
      device.synchronize();
      profiler->begin();
    }
    StepTrace *traced = &program == &training ? trace : nullptr;
    auto markBegin = [traced, i, m = microbatch] {
      if (traced)
        traced->begin(m, i);
    };
    auto markEnd = [traced, i, m = microbatch] {
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
  badGradient = -1;
  lrFactor = plan.lrSchedule ? plan.lrSchedule->factor(step) : 1.0;
  int64_t updatesBefore = optimizer ? optimizer->steps() : 0;
  compute([this] { lossSum.zero_(); });
  for (microbatch = 0; microbatch < plan.accumulationSteps; ++microbatch) {
    if (microbatch > 0)
      comm.beginMicrobatch();
    bindInputs(arena.stepInputs(), inputs, microbatch);
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
    if (clips)
      result.gradNorm = gradNorm.item<double>();
    for (at::Tensor &value : values)
      value.reset();
  });
  streams->synchronize();
  double rate =
      optimizer ? optimizer->currentSettings().front().lr : plan.optimizer.lr;
  result.learningRate = rate * lrFactor;
  result.badGradient = badGradient;
  if (scaler) {
    result.lossScale = scaler->scale().item<double>();
    result.skipped = scaler->foundInf();
    scaler->update();
  }
  // It knows neither of updates that a graph replays, nor of those that its
  // kernels skip.
  if (optimizer)
    optimizer->setSteps(updatesBefore + (result.skipped ? 0 : 1));
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
  lossTerm.copy_(values[loss].reshape({}));
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
    return runPart(0, isLastMicrobatch() ? plan.instructions.size()
                                         : optimizerBegin);
  HostState before = aliasState();
  checkInputs(before);
  std::vector<StepGraphs::Segment *> segments = graphs->segmentsOf(microbatch);
  for (StepGraphs::Segment *segment : segments) {
    StepGraphs::Outcome outcome = graphs->run(
        *segment, microbatch,
        [this, begin = segment->begin, end = segment->end] {
          runPart(begin, end);
        },
        [&] { restoreState(before); });
    if (segment == segments.back())
      break;
    // What the next segment takes of this one: a replay gives the host nothing.
    if (outcome == StepGraphs::Outcome::Captured) {
      carried = aliasState().values;
      if (plan::ValueId value = unplaced(segment->end); value != -1)
        graphs->abandon("the optimizer takes value " + std::to_string(value) +
                        ", which lies outside the arena");
    }
    if (outcome == StepGraphs::Outcome::Replayed)
      values = carried;
    before = aliasState();
  }
}

plan::ValueId Executor::unplaced(size_t begin) const {
  const std::byte *arenaBegin = arena.deviceMemory()->base();
  for (size_t i = begin; i < plan.instructions.size(); ++i)
    for (plan::ValueId value : plan::getOperands(plan.instructions[i])) {
      if (!values[value].defined() || values[value].numel() == 0)
        continue;
      auto *data =
          static_cast<const std::byte *>(values[value].const_data_ptr());
      bool isInArena = data >= arenaBegin && data < arenaBegin + arena.bytes();
      if (!isInArena && !host.holds(data))
        return value;
    }
  return -1;
}

Executor::HostState Executor::aliasState() const {
  auto alias = [](const at::Tensor &tensor) {
    return tensor.defined() && tensor.has_storage()
               ? at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(),
                               tensor.strides(), tensor.options())
               : tensor;
  };
  HostState state{values, gathered, sums};
  for (std::vector<at::Tensor> *list : {&state.values, &state.sums})
    for (at::Tensor &tensor : *list)
      tensor = alias(tensor);
  for (std::vector<at::Tensor> &unit : state.gathered)
    for (at::Tensor &tensor : unit)
      tensor = alias(tensor);
  return state;
}

void Executor::restoreState(const HostState &state) {
  values = state.values;
  gathered = state.gathered;
  sums = state.sums;
}

void Executor::checkInputs(const HostState &state) {
  capturedInputs.resize(size_t(plan.accumulationSteps));
  std::vector<const void *> places;
  for (const plan::Input &input : plan.inputs)
    places.push_back(state.values[input.value].const_data_ptr());
  std::vector<const void *> &before = capturedInputs[size_t(microbatch)];
  if (graphs->isCaptured(microbatch) && places != before)
    throw RunError(
        "step " + std::to_string(step + 1) +
        ": the inputs lie elsewhere than when the step was captured");
  before = std::move(places);
}

void Executor::bindInputs(RankArena::Site site, const Inputs &inputs,
                          int64_t number) {
  compute([this, site, &inputs, number] {
    RankArena::Scope scope(arena, site);
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
  compute([this] { lossSum.zero_(); });
  submit(evaluation, 0, plan.evaluation.size());
  double loss = 0;
  compute([&] {
    addLoss(plan.evaluationLoss);
    loss = lossSum.item<double>();
    for (at::Tensor &value : values)
      value.reset();
  });
  streams->synchronize();
  arena.endProgram();
  return loss;
}

std::vector<plan::Optimizer> Executor::optimizerSettings() const {
  return optimizer ? optimizer->currentSettings() : plan.optimizerGroups();
}

void Executor::setOptimizerSettings(
    const std::vector<plan::Optimizer> &changed) {
  if (!optimizer || changed == optimizer->currentSettings())
    return;
  optimizer->setSettings(changed);
  if (graphs)
    useGraphs(); // those that exist have the old ones
}

} // namespace fsdp::runtime
