//===- Operands.cpp - what an instruction reads, defines and occupies -----===//
#include "fsdp/Plan/Operands.h"

namespace fsdp::plan {

namespace {

void appendValue(ValueId value, std::vector<ValueId> &to) {
  if (value != -1)
    to.push_back(value);
}
void appendValues(ValueId value, std::vector<ValueId> &to) {
  appendValue(value, to);
}
void appendValues(const std::vector<ValueId> &values,
                  std::vector<ValueId> &to) {
  for (ValueId value : values)
    appendValue(value, to);
}
void appendValues(const ArgList &args, std::vector<ValueId> &to) {
  for (const Arg &arg : args)
    if (const auto *tensor = std::get_if<TensorArg>(&arg.value))
      to.push_back(tensor->value);
    else if (const auto *list = std::get_if<ArgList>(&arg.value))
      appendValues(*list, to);
}

/// Those of the fields of a role.
template <typename StructT>
void appendRole(const StructT &of, Role role, std::vector<ValueId> &to) {
  forEachField<StructT>([&](const auto &field) {
    if constexpr (requires { appendValues(field.in(of), to); })
      if (field.role == role)
        appendValues(field.in(of), to);
  });
}

std::vector<ValueId> valuesOf(const Instruction &instruction, Role role) {
  std::vector<ValueId> values;
  std::visit([&](const auto &kind) { appendRole(kind, role, values); },
             instruction.kind);
  appendRole(instruction, role, values);
  return values;
}

} // namespace

std::vector<ValueId> getOperands(const Instruction &instruction) {
  return valuesOf(instruction, Role::Operand);
}

std::vector<ValueId> getOperands(const Call &call) {
  std::vector<ValueId> values;
  appendRole(call, Role::Operand, values);
  return values;
}

std::vector<ValueId> getMutated(const Instruction &instruction) {
  return valuesOf(instruction, Role::Mutated);
}

std::vector<ValueId> getResults(const Instruction &instruction) {
  return valuesOf(instruction, Role::Result);
}

std::string_view verbOf(const Instruction &instruction) {
  return std::visit(
      [](const auto &kind) -> std::string_view { return kind.verb; },
      instruction.kind);
}

std::string titleOf(const Plan &plan, const Instruction &instruction) {
  return std::visit(
      [&]<typename KindT>(const KindT &kind) -> std::string {
        if constexpr (std::is_same_v<KindT, Call>)
          return kind.op;
        else if constexpr (std::is_same_v<KindT, Fused>)
          return "fused " + plan.kernels[size_t(kind.kernel)].name;
        else if constexpr (requires { kind.unit; })
          return std::string(kind.verb) + ' ' +
                 plan.units[size_t(kind.unit)].name;
        else
          return kind.verb;
      },
      instruction.kind);
}

Stream ownStream(const Instruction &instruction) {
  return std::visit(
      []<typename KindT>(const KindT &) {
        if constexpr (requires { KindT::ownStream; })
          return KindT::ownStream;
        else
          return Stream::Compute;
      },
      instruction.kind);
}

std::vector<bool> computesOnHost(const Plan &plan) {
  std::vector<bool> isOnHost(plan.values.size());
  std::vector<bool> result;
  for (const Instruction &instruction : plan.instructions) {
    std::vector<ValueId> operands = getOperands(instruction);
    bool takes = false;
    for (ValueId value : operands)
      takes |= isOnHost[value];
    result.push_back(takes);
    std::vector<ValueId> results = getResults(instruction);
    if (std::holds_alternative<CopyToHost>(instruction.kind))
      for (ValueId value : results)
        isOnHost[value] = true;
    else if (takes)
      // Sums, unscaled and clipped gradients, one for each operand.
      for (size_t i = 0; i < results.size(); ++i)
        isOnHost[results[i]] = isOnHost[operands[i]];
  }
  return result;
}

bool runsIn(const Plan &plan, const Instruction &instruction,
            int64_t microbatch) {
  if (instruction.when == When::First)
    return microbatch == 0;
  if (instruction.when == When::Last || instruction.phase == Phase::Optimizer)
    return microbatch == plan.accumulationSteps - 1;
  return true;
}

int64_t runsPerStep(const Plan &plan, const Instruction &instruction) {
  bool isOnce =
      instruction.when != When::Every || instruction.phase == Phase::Optimizer;
  return isOnce ? 1 : plan.accumulationSteps;
}

} // namespace fsdp::plan
