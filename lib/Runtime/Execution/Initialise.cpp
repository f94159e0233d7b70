//===- Initialise.cpp - the model's own initialisation --------------------===//
#include "fsdp/Runtime/Execution/Initialise.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Memory/Layout.h"
#include "fsdp/Runtime/Operators/CallTable.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/InferenceMode.h>

namespace fsdp::runtime {

namespace {

class Initialiser {
public:
  Initialiser(const plan::Plan &plan, Comm &comm,
              const std::vector<at::Tensor> &buffers)
      : plan(plan), comm(comm), buffers(buffers), values(plan.values.size()),
        calls(plan, plan.init) {}

  void run() {
    for (size_t i = 0; i < plan.init.size(); ++i) {
      const plan::Instruction &instruction = plan.init[i];
      auto fail = [&](const std::string &message) {
        throw RunError(
            "initialisation: " + describeInstruction(plan, instruction) + ": " +
            firstLine(message));
      };
      try {
        execute(i, instruction);
      } catch (const c10::Error &error) {
        fail(error.what_without_backtrace());
      } catch (const std::exception &error) {
        fail(error.what());
      }
      for (plan::ValueId value : instruction.frees)
        values[value].reset();
    }
  }

private:
  void execute(size_t index, const plan::Instruction &instruction) {
    if (const auto *call = std::get_if<plan::Call>(&instruction.kind)) {
      calls.run(index, *call, values);
    } else if (const auto *constant =
                   std::get_if<plan::Constant>(&instruction.kind)) {
      values[constant->out] = calls.constant(index);
    } else if (const auto *write =
                   std::get_if<plan::WriteParam>(&instruction.kind)) {
      writeParam(plan, comm, write->param,
                 checked(write->value, plan.params[write->param].spec));
    } else if (const auto *write =
                   std::get_if<plan::WriteBuffer>(&instruction.kind)) {
      const plan::Buffer &buffer = plan.buffers[write->buffer];
      copyLaidOut(buffers[write->buffer], checked(write->value, buffer.spec),
                  "the value");
    }
  }

  /// The operators decide what comes out; copy_ would broadcast and convert.
  const at::Tensor &checked(plan::ValueId id, const plan::TensorSpec &spec) {
    const at::Tensor &value = values[id];
    if (!value.defined() || value.sizes() != spec.shape ||
        value.scalar_type() != scalarType(spec.dtype))
      throw RunError("the value does not have the declared shape and dtype");
    return value;
  }

  const plan::Plan &plan;
  Comm &comm;
  const std::vector<at::Tensor> &buffers;
  std::vector<at::Tensor> values;
  CallTable calls;
};

} // namespace

void writeParam(const plan::Plan &plan, Comm &comm, int32_t param,
                const at::Tensor &whole) {
  at::Tensor shard = comm.shard(param);
  if (plan.params[param].unit == -1) {
    shard.copy_(whole);
    return;
  }
  int64_t dim = plan.params[param].shardDim;
  plan::RowRange rows =
      plan::shardRows(whole.size(dim), plan.shards(), comm.shardIndex());
  if (rows.size() > 0)
    shard.copy_(whole.narrow(dim, rows.begin, rows.size()));
}

void initialise(const plan::Plan &plan, Comm &comm,
                const std::vector<at::Tensor> &buffers, uint64_t seed) {
  c10::InferenceMode guard;
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  generator.set_current_seed(seed);
  Initialiser(plan, comm, buffers).run();
}

} // namespace fsdp::runtime
