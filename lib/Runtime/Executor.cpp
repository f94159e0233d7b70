//===- Executor.cpp - runs a plan's instructions --------------------------===//
#include "fsdp/Runtime/Executor.h"
#include "fsdp/Runtime/Arguments.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/SteeredAllocator.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <csignal>
#include <cstring>

#include <unistd.h>

namespace fsdp::runtime {

struct Executor::ResolvedCall {
  c10::OperatorHandle handle;
  std::vector<ArgTemplate> args;
};

namespace {

std::string firstLine(const std::string &text) {
  return text.substr(0, text.find('\n'));
}

/// The unit whose module contains `module`: the longest unit name that is a
/// dotted prefix, the root unit if none is.
const plan::Unit *unitOf(const plan::Plan &plan, const std::string &module) {
  const plan::Unit *best = nullptr;
  for (const plan::Unit &unit : plan.units) {
    bool contains = unit.name.empty() || module == unit.name ||
                    module.starts_with(unit.name + ".");
    if (contains && (!best || unit.name.size() > best->name.size()))
      best = &unit;
  }
  return best;
}

} // namespace

std::string describeInstruction(const plan::Plan &plan, size_t position) {
  if (position >= plan.instructions.size())
    return "outside the program";
  const plan::Instruction &instruction = plan.instructions[position];
  struct Visitor {
    const plan::Plan &plan;
    std::string unit(const char *name, int32_t index) {
      return std::string(name) + " of unit \"" + plan.units[index].name + "\"";
    }
    std::string operator()(const plan::Call &call) { return call.op; }
    std::string operator()(const plan::ReadBuffer &read) {
      return "read_buffer \"" + plan.buffers[read.buffer].name + "\"";
    }
    std::string operator()(const plan::Constant &) { return "constant"; }
    std::string operator()(const plan::AllGather &gather) {
      return unit("all_gather", gather.unit);
    }
    std::string operator()(const plan::Reshard &reshard) {
      return unit("reshard", reshard.unit);
    }
    std::string operator()(const plan::ReduceScatter &reduce) {
      return unit("reduce_scatter", reduce.unit);
    }
    std::string operator()(const plan::OptimizerStep &) {
      return "optimizer_step";
    }
  };
  std::string text = std::visit(Visitor{plan}, instruction.kind);
  if (instruction.module < 0 ||
      !std::holds_alternative<plan::Call>(instruction.kind))
    return text;
  const std::string &module = plan.modules[instruction.module];
  text += " in module \"" + module + "\"";
  if (const plan::Unit *unit = unitOf(plan, module))
    text += " (unit \"" + unit->name + "\")";
  return text;
}

Executor::Executor(const plan::Plan &plan, Comm &comm, Position &position,
                   std::vector<at::Tensor> buffers)
    : plan(plan), comm(comm), position(position), buffers(std::move(buffers)),
      values(plan.values.size()), calls(plan.instructions.size()),
      constants(plan.instructions.size()) {
  c10::InferenceMode guard;
  for (size_t i = 0; i < plan.instructions.size(); ++i) {
    const auto &kind = plan.instructions[i].kind;
    if (const auto *call = std::get_if<plan::Call>(&kind)) {
      try {
        resolve(*call, i);
      } catch (const InputError &error) {
        throw InputError("instruction " + std::to_string(i) + ": " +
                         describeInstruction(plan, i) + ": " + error.what());
      }
    } else if (const auto *constant = std::get_if<plan::Constant>(&kind)) {
      const plan::TensorSpec &spec = plan.values[constant->out];
      constants[i] = at::empty(spec.shape, scalarType(spec.dtype));
      if (!constant->data.empty())
        std::memcpy(constants[i].mutable_data_ptr(), constant->data.data(),
                    constant->data.size());
    } else if (const auto *step = std::get_if<plan::OptimizerStep>(&kind)) {
      std::vector<at::Tensor> shards;
      for (int32_t param : step->params)
        shards.push_back(comm.shard(param));
      optimizer =
          std::make_unique<ShardedOptimizer>(plan.optimizer, std::move(shards));
    }
  }
}

Executor::~Executor() = default;

void Executor::resolve(const plan::Call &call, size_t position) {
  auto handle =
      c10::Dispatcher::singleton().findSchema({call.op, call.overload});
  if (!handle)
    throw InputError("no operator \"" + call.op +
                     (call.overload.empty() ? "" : "." + call.overload) +
                     "\" in this LibTorch");
  const c10::FunctionSchema &schema = handle->schema();
  if (schema.arguments().size() != call.args.size())
    throw InputError("expected " + std::to_string(schema.arguments().size()) +
                     " arguments, got " + std::to_string(call.args.size()));
  auto resolved = std::make_unique<ResolvedCall>(ResolvedCall{*handle, {}});
  for (size_t i = 0; i < call.args.size(); ++i) {
    const c10::Argument &formal = schema.arguments()[i];
    try {
      resolved->args.emplace_back(call.args[i], formal);
    } catch (const InputError &error) {
      throw InputError("argument \"" + formal.name() + "\": " + error.what());
    }
  }
  calls[position] = std::move(resolved);
}

std::vector<at::Tensor>
Executor::take(const std::vector<plan::ValueId> &ids) const {
  std::vector<at::Tensor> result;
  result.reserve(ids.size());
  for (plan::ValueId id : ids)
    result.push_back(values[id]);
  return result;
}

void Executor::run(const plan::Call &call, ResolvedCall &resolved) {
  stack.clear();
  for (const ArgTemplate &arg : resolved.args)
    stack.push_back(arg.instantiate(values));
  void *place =
      call.reduceInputOf >= 0 ? comm.reduceInput(call.reduceInputOf) : nullptr;
  if (place) {
    SteerAllocation steer(
        place, size_t(plan.params[call.reduceInputOf].spec.numBytes()));
    resolved.handle.callBoxed(stack);
  } else {
    resolved.handle.callBoxed(stack);
  }

  size_t next = 0;
  auto assign = [&](at::Tensor tensor) {
    if (next < call.outs.size() && call.outs[next] >= 0)
      values[call.outs[next]] = std::move(tensor);
    ++next;
  };
  for (c10::IValue &result : stack) {
    if (result.isTensor())
      assign(std::move(result).toTensor());
    else if (result.isTensorList())
      for (const at::Tensor &tensor : result.toTensorVector())
        assign(tensor);
    else
      throw RunError("expected tensors as results, got " + result.tagKind());
  }
  stack.clear();
  if (next != call.outs.size())
    throw RunError("expected " + std::to_string(call.outs.size()) +
                   " results, got " + std::to_string(next));
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
    void operator()(const plan::Call &call) { e.run(call, *e.calls[index]); }
    void operator()(const plan::ReadBuffer &read) {
      e.values[read.out] = e.buffers[read.buffer];
    }
    void operator()(const plan::Constant &constant) {
      e.values[constant.out] = e.constants[index];
    }
    void operator()(const plan::AllGather &gather) { e.run(gather); }
    void operator()(const plan::Reshard &reshard) {
      e.comm.reshard(reshard.unit);
    }
    void operator()(const plan::ReduceScatter &reduce) { e.run(reduce); }
    void operator()(const plan::OptimizerStep &step) { e.run(step); }
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
                     describeInstruction(plan, i) + ": " + firstLine(message));
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
