//===- CallTable.cpp - the operator calls of a program --------------------===//
#include "fsdp/Runtime/Operators/CallTable.h"
#include "fsdp/Plan/ModelCollectives.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Memory/Layout.h"
#include "fsdp/Runtime/Operators/Arguments.h"
#include "fsdp/Runtime/Operators/AttentionKernels.h"
#include "fsdp/Runtime/Operators/KernelCheck.h"
#include "fsdp/Runtime/Operators/Operators.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/StringUtil.h>

#include <cstring>

namespace fsdp::runtime {

struct CallTable::ResolvedCall {
  c10::OperatorHandle handle;
  std::vector<ArgTemplate> args;
  /// The shapes of results depend on operands' values, as of x[mask].
  bool shapedByValues;
  /// Of an operator that is not ATen's.
  std::optional<KernelCheck> check;
  /// It is a collective of a mesh axis that the plan's own do not serve.
  bool communicates;
};

std::string firstLine(const std::string &text) {
  return text.substr(0, text.find('\n'));
}

std::string describeInstruction(const plan::Plan &plan,
                                const plan::Instruction &instruction) {
  std::string text = std::visit(
      [&]<typename KindT>(const KindT &kind) -> std::string {
        std::string verb = kind.verb;
        if constexpr (std::is_same_v<KindT, plan::Call>)
          return kind.op + (kind.recompute ? ", recomputed," : "");
        else if constexpr (std::is_same_v<KindT, plan::Fused>)
          return "kernel \"" + plan.kernels[kind.kernel].name + "\"";
        else if constexpr (requires { kind.unit; })
          return verb + " of unit \"" + plan.units[kind.unit].name + "\"";
        else if constexpr (requires { kind.param; })
          return verb + " \"" + plan.params[kind.param].name + "\"";
        else if constexpr (requires { kind.buffer; })
          return verb + " \"" + plan.buffers[kind.buffer].name + "\"";
        else
          return verb;
      },
      instruction.kind);
  bool computes = std::holds_alternative<plan::Call>(instruction.kind) ||
                  std::holds_alternative<plan::Fused>(instruction.kind);
  if (instruction.module < 0 || !computes)
    return text;
  const std::string &module = plan.modules[instruction.module];
  text += " in module \"" + module + "\"";
  if (int32_t unit = plan::unitOfModule(plan, module); unit != -1)
    text += " (unit \"" + plan.units[unit].name + "\")";
  if (instruction.line != -1)
    text += " at " + plan.lines[instruction.line];
  return text;
}

/// Of a checkpoint that is read or written.
static std::string describeSave(const Position &position) {
  SavePoint point = position.savePoint.load();
  if (point == SavePoint::None)
    return "";
  return ", in the checkpoint of step " +
         std::to_string(position.savedStep.load()) + " (" +
         std::string(kSavePoints[size_t(point)]) + ")";
}

static std::string describeStep(const plan::Plan &plan,
                                const Position &position) {
  int64_t step = position.step.load();
  if (step < 0)
    return " before its first step";
  std::string number = std::to_string(step + 1);
  if (position.saving.load())
    return " while the weights were saved after step " + number;
  auto instruction = size_t(position.instruction.load());
  std::string text = " at step " + number;
  const std::vector<plan::Instruction> *program = &plan.instructions;
  if (instruction >= program->size()) {
    instruction -= program->size();
    program = &plan.evaluation;
    text += ", evaluation";
  }
  if (instruction >= program->size())
    return text;
  return text + ", instruction " + std::to_string(instruction) + ": " +
         describeInstruction(plan, (*program)[instruction]);
}

std::string describePosition(const plan::Plan &plan, const Position &position) {
  return describeStep(plan, position) + describeSave(position);
}

CallTable::CallTable(const plan::Plan &plan,
                     const std::vector<plan::Instruction> &instructions,
                     c10::Device device)
    : plan(plan), instructions(instructions),
      trains(&instructions == &plan.instructions), device(device),
      strides(plan), ran(instructions.size()), calls(instructions.size()),
      constants(instructions.size()) {
  c10::InferenceMode guard;
  if (!device.is_cpu())
    attention = std::make_unique<AttentionKernels>(plan);
  for (size_t i = 0; i < instructions.size(); ++i) {
    const auto &kind = instructions[i].kind;
    try {
      if (const auto *call = std::get_if<plan::Call>(&kind))
        resolve(*call, i);
      if (attention)
        attention->add(instructions[i], i);
    } catch (const InputError &error) {
      throw InputError("instruction " + std::to_string(i) + ": " +
                       describeInstruction(plan, instructions[i]) + ": " +
                       error.what());
    }
    if (const auto *constant = std::get_if<plan::Constant>(&kind)) {
      const plan::TensorSpec &spec = plan.values[constant->out];
      constants[i] = at::empty(spec.shape, scalarType(spec.dtype));
      if (!constant->data.empty())
        std::memcpy(constants[i].mutable_data_ptr(), constant->data.data(),
                    constant->data.size());
      constants[i] = constants[i].to(device);
    }
  }
}

CallTable::~CallTable() = default;

void CallTable::resolve(const plan::Call &call, size_t index) {
  c10::OperatorHandle handle = findOperator(call);
  const c10::FunctionSchema &schema = handle.schema();
  if (schema.arguments().size() != call.args.size())
    throw InputError("expected " + std::to_string(schema.arguments().size()) +
                     " arguments, got " + std::to_string(call.args.size()));
  auto resolved = std::make_unique<ResolvedCall>(
      ResolvedCall{handle,
                   {},
                   handle.hasTag(at::Tag::dynamic_output_shape),
                   std::nullopt,
                   plan::isModelCollective(call.op)});
  for (size_t i = 0; i < call.args.size(); ++i) {
    const c10::Argument &formal = schema.arguments()[i];
    try {
      resolved->args.emplace_back(call.args[i], formal, device);
    } catch (const InputError &error) {
      throw InputError("argument \"" + formal.name() + "\": " + error.what());
    }
  }
  if (!call.schema.empty())
    resolved->check.emplace(plan, call, handle);
  calls[index] = std::move(resolved);
}

void CallTable::run(size_t index, const plan::Call &call,
                    std::vector<at::Tensor> &values) {
  ResolvedCall &resolved = *calls[index];
  stack.clear();
  for (const ArgTemplate &arg : resolved.args)
    stack.push_back(arg.instantiate(values));
  bool isFirst = !ran[index];
  ran[index] = true;
  if (isFirst)
    strides.beforeCall(call);
  if (resolved.check)
    resolved.check->before(values);
  try {
    invoke(index);
  } catch (const c10::Error &error) {
    std::string stray = isFirst ? strides.explain(call) : "";
    if (stray.empty())
      throw;
    throw RunError(firstLine(error.what_without_backtrace()) + "; it takes " +
                   stray);
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
    else if (result.isNone() || result.isScalar())
      assign({}); // captured numbers are constants of the calls that take them
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
  if (resolved.check)
    resolved.check->after(values);
  else if (resolved.shapedByValues)
    checkShapes(call, values);
  if (isFirst)
    strides.afterCall(instructions[index], call, values);
}

void CallTable::checkShapes(const plan::Call &call,
                            const std::vector<at::Tensor> &values) const {
  for (plan::ValueId out : call.outs)
    if (out != -1 && values[out].sizes() != plan.values[out].shape)
      throw RunError("expected a result of shape " +
                     c10::str(at::IntArrayRef(plan.values[out].shape)) +
                     " as captured, got " + c10::str(values[out].sizes()) +
                     ": the values of an operand, such as a mask, differ");
}

/// Until the collectives that make these results are complete: the plan reuses
/// the memory of operands right after a call.
static void waitFor(const std::vector<c10::IValue> &results) {
  static const auto wait =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("_c10d_functional::wait_tensor", "")
          .typed<at::Tensor(const at::Tensor &)>();
  for (const c10::IValue &result : results)
    if (result.isTensor())
      wait.call(result.toTensor());
    else if (result.isTensorList())
      for (const at::Tensor &tensor : result.toTensorVector())
        wait.call(tensor);
}

void CallTable::invoke(size_t index) {
  // As in eager execution: some forward kernels keep something for backward
  // only if a gradient is wanted. Autograd kernels of other libraries call
  // their kernels without gradients.
  c10::AutoGradMode gradients(
      trains && instructions[index].phase == plan::Phase::Forward &&
      !calls[index]->check);
  if (attention && attention->runs(index))
    attention->run(index, stack);
  else
    calls[index]->handle.callBoxed(stack);
  if (calls[index]->communicates)
    waitFor(stack);
}

} // namespace fsdp::runtime
