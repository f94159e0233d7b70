//===- Session.cpp - one rank of an open plan -----------------------------===//
#include "fsdp/Runtime/Execution/Session.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Execution/Initialise.h"
#include "fsdp/Runtime/Memory/Layout.h"

#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

namespace fsdp::runtime {

Session::Session(const plan::Plan &plan, Comm &comm, Device &device,
                 Position &position, const StreamSettings &streams)
    : plan(plan), communication(comm), device(device), position(position),
      streams(streams) {
  for (const plan::Buffer &buffer : plan.buffers)
    ownBuffers.push_back(
        emptyLaidOut(buffer.spec, buffer.strides, device.where()));
}

void Session::load(const WeightFiles &weights) {
  for (size_t p = 0; p < plan.params.size(); ++p) {
    const plan::Param &param = plan.params[p];
    int64_t begin = 0;
    if (param.unit != -1)
      begin = plan::shardRows(param.spec.shape[param.shardDim], plan.shards(),
                              communication.shardIndex())
                  .begin;
    weights.read(param, begin, communication.shard(int32_t(p)));
    position.beat();
  }
  for (size_t b = 0; b < ownBuffers.size(); ++b)
    if (weights.has(plan.buffers[b]))
      weights.read(plan.buffers[b], ownBuffers[b]);
}

void Session::initialise(uint64_t seed) {
  runtime::initialise(plan, communication, ownBuffers, seed);
}

void Session::start() {
  communication.publish();
  program.emplace(plan, communication, device, position, ownBuffers,
                  makeStreams());
  const RankArena &arena = program->memory();
  if (arena.bytes() > 0)
    communication.registerMemory(arena.deviceMemory(), size_t(arena.bytes()));
}

std::unique_ptr<Streams> Session::makeStreams() {
  if (!streams.maxDelayMicroseconds)
    return device.makeStreams();
  ThreadStreamOptions options;
  options.initialise = [threads = streams.threads] {
    at::set_num_threads(threads);
  };
  options.abort = [this] { communication.abort(); };
  options.maxDelayMicroseconds = *streams.maxDelayMicroseconds;
  // Other ranks delay other streams.
  options.seed = streams.seed + uint64_t(communication.rank());
  return makeThreadStreams(std::move(options));
}

void Session::setCallerWrites() {
  callerWrites = true;
  program->setPublishes(false);
}

// After a step nobody reads the parameters until the next one begins.
StepResult Session::step(const Executor::Inputs &inputs) {
  if (callerWrites)
    communication.publish(/*frozen=*/true);
  return program->runStep(stepsDone++, inputs);
}

double Session::evaluate(const Executor::Inputs &inputs) {
  if (!callerWrites)
    return program->evaluate(inputs);
  communication.publish(/*frozen=*/true);
  double loss = program->evaluate(inputs);
  communication.barrier();
  return loss;
}

void Session::bindBuffer(int32_t buffer, const at::Tensor &tensor) {
  const at::Tensor &own = ownBuffers[size_t(buffer)];
  if (tensor.sizes() != own.sizes() || tensor.strides() != own.strides() ||
      tensor.scalar_type() != own.scalar_type() ||
      tensor.device() != own.device())
    throw InputError("buffer \"" + plan.buffers[size_t(buffer)].name +
                     "\": expected " + own.toString() + c10::str(own.sizes()) +
                     " of strides " + c10::str(own.strides()) + ", got " +
                     tensor.toString() + c10::str(tensor.sizes()) +
                     " of strides " + c10::str(tensor.strides()));
  ownBuffers[size_t(buffer)] = tensor;
  if (program)
    program->setBuffer(size_t(buffer), tensor);
}

std::optional<size_t> Session::shardOf(int32_t param) const {
  for (const plan::Instruction &instruction : plan.instructions) {
    const auto *step = std::get_if<plan::OptimizerStep>(&instruction.kind);
    if (!step || !program->shardedOptimizer())
      continue;
    auto found = std::find(step->params.begin(), step->params.end(), param);
    if (found != step->params.end())
      return size_t(found - step->params.begin());
  }
  return std::nullopt;
}

ShardedOptimizer::NamedTensors Session::optimizerState(int32_t param) {
  std::optional<size_t> shard = shardOf(param);
  return shard ? program->shardedOptimizer()->state(*shard)
               : ShardedOptimizer::NamedTensors();
}

void Session::bindOptimizerState(int32_t param,
                                 const ShardedOptimizer::NamedTensors &state) {
  if (std::optional<size_t> shard = shardOf(param))
    program->shardedOptimizer()->bindState(*shard, state);
}

void Session::setSteps(int64_t steps) {
  stepsDone = steps;
  if (ShardedOptimizer *optimizer = program->shardedOptimizer())
    optimizer->setSteps(steps);
}

void Session::quiesce() { communication.barrier(); }

at::Tensor Session::fullParam(int32_t param) {
  int32_t unit = plan.params[param].unit;
  if (unit == -1)
    return communication.shard(param);
  const std::vector<int32_t> &members = plan.units[unit].params;
  auto index = std::find(members.begin(), members.end(), param);
  return communication.gatherMasters(unit)[size_t(index - members.begin())];
}

} // namespace fsdp::runtime
