//===- Executor.cpp - runs a plan's instructions --------------------------===//
#include "fsdp/Runtime/Executor.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/SteeredAllocator.h"

#include <c10/core/InferenceMode.h>

#include <csignal>

#include <unistd.h>

namespace fsdp::runtime {

Executor::Executor(const plan::Plan &plan, Comm &comm, Position &position,
                   std::vector<at::Tensor> buffers)
    : plan(plan), comm(comm), position(position), buffers(std::move(buffers)),
      values(plan.values.size()), calls(plan, plan.instructions) {
  c10::InferenceMode guard;
  for (const plan::Instruction &instruction : plan.instructions) {
    const auto *step = std::get_if<plan::OptimizerStep>(&instruction.kind);
    if (!step)
      continue;
    std::vector<at::Tensor> shards;
    for (int32_t param : step->params)
      shards.push_back(comm.shard(param));
    optimizer =
        std::make_unique<ShardedOptimizer>(plan.optimizer, std::move(shards));
  }
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

void Executor::run(const plan::Call &call, size_t index) {
  void *place =
      call.reduceInputOf >= 0 ? comm.reduceInput(call.reduceInputOf) : nullptr;
  if (!place) {
    calls.run(index, call, values);
    return;
  }
  SteerAllocation steer(
      place, size_t(plan.params[call.reduceInputOf].spec.numBytes()));
  calls.run(index, call, values);
}

void Executor::run(const plan::AllGather &gather) {
  std::vector<at::Tensor> full = comm.allGather(gather.unit);
  for (size_t i = 0; i < full.size(); ++i)
    if (gather.outs[i] >= 0)
      values[gather.outs[i]] = std::move(full[i]);
}

void Executor::run(const plan::ReduceScatter &reduce) {
  std::vector<at::Tensor> grads = take(reduce.ins);
  for (size_t i = 0; i < grads.size(); ++i) {
    const plan::Param &param = plan.params[reduce.params[i]];
    // The operators decide what comes out; peers would read past a tensor of
    // another size.
    if (!grads[i].defined() || grads[i].sizes() != param.spec.shape ||
        grads[i].scalar_type() != scalarType(param.spec.dtype))
      throw RunError("the gradient of \"" + param.name +
                     "\" does not have the parameter's shape and dtype");
  }
  std::vector<at::Tensor> shards = comm.reduceScatter(reduce, grads);
  for (size_t i = 0; i < shards.size(); ++i)
    values[reduce.outs[i]] = std::move(shards[i]);
}

void Executor::run(const plan::OptimizerStep &step) {
  comm.beginUpdate();
  optimizer->step(take(step.grads));
  comm.publish();
}

void Executor::execute(size_t index) {
  const plan::Instruction &instruction = plan.instructions[index];
  struct Visitor {
    Executor &e;
    size_t index;
    void operator()(const plan::Call &call) { e.run(call, index); }
    void operator()(const plan::ReadBuffer &read) {
      e.values[read.out] = e.buffers[read.buffer];
    }
    void operator()(const plan::Constant &constant) {
      e.values[constant.out] = e.calls.constant(index);
    }
    void operator()(const plan::AllGather &gather) { e.run(gather); }
    void operator()(const plan::Reshard &reshard) {
      e.comm.reshard(reshard.unit);
    }
    void operator()(const plan::ReduceScatter &reduce) { e.run(reduce); }
    void operator()(const plan::OptimizerStep &step) { e.run(step); }
    // Plan::init alone has these (P13).
    void operator()(const plan::WriteParam &) {}
    void operator()(const plan::WriteBuffer &) {}
  };
  std::visit(Visitor{*this, index}, instruction.kind);
  for (plan::ValueId value : instruction.frees)
    values[value].reset();
}

void Executor::injectFault(int64_t step, size_t index) const {
  if (!fault || fault->rank != comm.rank() || fault->step != step + 1 ||
      fault->instruction != int64_t(index))
    return;
  if (fault->kill)
    kill(getpid(), SIGKILL);
  throw RunError("injected fault");
}

double Executor::runStep(int64_t step, const std::vector<at::Tensor> &inputs) {
  c10::InferenceMode guard;
  comm.beginStep(step);
  position.step.store(step, std::memory_order_relaxed);
  for (size_t i = 0; i < inputs.size(); ++i)
    values[plan.inputs[i].value] = inputs[i];
  for (size_t i = 0; i < plan.instructions.size(); ++i) {
    position.instruction.store(int64_t(i), std::memory_order_relaxed);
    auto fail = [&](const std::string &message) {
      throw RunError("step " + std::to_string(step + 1) + ": " +
                     describeInstruction(plan, plan.instructions[i]) + ": " +
                     firstLine(message));
    };
    try {
      injectFault(step, i);
      execute(i);
    } catch (const AbortedError &) {
      throw;
    } catch (const PeerDiedError &) {
      throw;
    } catch (const c10::Error &error) {
      fail(error.what_without_backtrace());
    } catch (const std::exception &error) {
      fail(error.what());
    }
  }
  auto loss = values[plan.loss].item<double>();
  for (at::Tensor &value : values)
    value.reset();
  return loss;
}

} // namespace fsdp::runtime
