//===- Operands.cpp - what an instruction reads, defines and occupies -----===//
#include "fsdp/Plan/Operands.h"

namespace fsdp::plan {

namespace {

void appendTensors(const ArgList &args, std::vector<ValueId> &to) {
  for (const Arg &arg : args)
    if (const auto *tensor = std::get_if<TensorArg>(&arg.value))
      to.push_back(tensor->value);
    else if (const auto *list = std::get_if<ArgList>(&arg.value))
      appendTensors(*list, to);
}

struct OperandVisitor {
  std::vector<ValueId> operator()(const Call &call) const {
    std::vector<ValueId> values;
    appendTensors(call.args, values);
    return values;
  }
  std::vector<ValueId> operator()(const AllGather &gather) const {
    return gather.source == -1 ? std::vector<ValueId>()
                               : std::vector<ValueId>{gather.source};
  }
  std::vector<ValueId> operator()(const OptimizerStep &step) const {
    return step.grads;
  }
  std::vector<ValueId> operator()(const ReloadActivation &reload) const {
    return {reload.host};
  }
  std::vector<ValueId> operator()(const WriteParam &write) const {
    return {write.value};
  }
  std::vector<ValueId> operator()(const WriteBuffer &write) const {
    return {write.value};
  }
  template <typename KindT>
  std::vector<ValueId> operator()(const KindT &kind) const {
    if constexpr (requires { kind.ins; })
      return kind.ins;
    else
      return {};
  }
};

struct StreamVisitor {
  Stream operator()(const AllGather &) const { return Stream::AllGather; }
  Stream operator()(const ReduceScatter &) const {
    return Stream::ReduceScatter;
  }
  Stream operator()(const AllReduce &) const { return Stream::AllReduce; }
  Stream operator()(const CopyToDevice &) const { return Stream::CopyToDevice; }
  Stream operator()(const CopyToHost &) const { return Stream::CopyToHost; }
  Stream operator()(const OffloadActivation &) const {
    return Stream::CopyToHost;
  }
  Stream operator()(const ReloadActivation &) const {
    return Stream::CopyToDevice;
  }
  template <typename KindT> Stream operator()(const KindT &) const {
    return Stream::Compute;
  }
};

struct ResultVisitor {
  template <typename KindT>
  std::vector<ValueId> operator()(const KindT &kind) const {
    if constexpr (requires { kind.outs; })
      return kind.outs;
    else if constexpr (requires { kind.out; })
      return {kind.out};
    else
      return {};
  }
};

} // namespace

std::vector<ValueId> getOperands(const Instruction &instruction) {
  return std::visit(OperandVisitor{}, instruction.kind);
}

std::vector<ValueId> getResults(const Instruction &instruction) {
  std::vector<ValueId> results = std::visit(ResultVisitor{}, instruction.kind);
  results.push_back(instruction.buffer);
  std::erase(results, -1);
  return results;
}

Stream ownStream(const Instruction &instruction) {
  return std::visit(StreamVisitor{}, instruction.kind);
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

bool runsIn(const Instruction &instruction, bool isFirst, bool isLast) {
  return std::visit(
      [&](const auto &kind) {
        if constexpr (requires { kind.firstMicrobatch; }) {
          return !kind.firstMicrobatch || isFirst;
        } else if constexpr (requires { kind.lastMicrobatch; }) {
          return !kind.lastMicrobatch || isLast;
        } else {
          return true;
        }
      },
      instruction.kind);
}

} // namespace fsdp::plan
