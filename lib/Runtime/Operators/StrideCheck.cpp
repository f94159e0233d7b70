//===- StrideCheck.cpp - results against the strides of the plan ----------===//
#include "fsdp/Runtime/Operators/StrideCheck.h"
#include "fsdp/Plan/Operands.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Memory/Layout.h"
#include "fsdp/Runtime/Operators/CallTable.h"

#include <c10/util/StringUtil.h>

namespace fsdp::runtime {

namespace {

/// Whether the operator finds elements by the strides of its first operand.
bool readsByStrides(const plan::Call &call) {
  return call.op.starts_with("aten::as_strided") ||
         call.op.starts_with("aten::_reshape_alias");
}

} // namespace

std::string StrideCheck::explain(plan::ValueId value) const {
  auto stray = strays.find(value);
  if (stray == strays.end() && plan.values[value].storage != -1)
    stray = strays.find(plan.values[value].storage);
  return stray == strays.end() ? "" : stray->second;
}

std::string StrideCheck::explain(const plan::Call &call) const {
  for (plan::ValueId operand : plan::getOperands({call}))
    if (std::string stray = explain(operand); !stray.empty())
      return stray;
  return "";
}

void StrideCheck::beforeCall(const plan::Call &call) const {
  if (!call.schema.empty())
    if (std::string stray = explain(call); !stray.empty())
      throw RunError("may read by strides " + stray);
  if (!readsByStrides(call) || call.args.empty())
    return;
  if (const auto *tensor = std::get_if<plan::TensorArg>(&call.args[0].value))
    if (std::string stray = explain(tensor->value); !stray.empty())
      throw RunError("reads by strides " + stray);
}

void StrideCheck::afterCall(const plan::Instruction &instruction,
                            const plan::Call &call,
                            const std::vector<at::Tensor> &values) {
  for (plan::ValueId out : call.outs) {
    if (out == -1)
      continue;
    const at::Tensor &result = values[out];
    const plan::Value &want = plan.values[out];
    if (!result.defined() || result.layout() != at::kStrided ||
        result.sizes() != want.shape || isLaidOut(result, want.strides))
      continue;
    strays[out] =
        "the result of " + describeInstruction(plan, instruction) +
        ", expected with strides " +
        c10::str(at::IntArrayRef(plan::fullStrides(want.shape, want.strides))) +
        " as captured, got " + c10::str(result.strides());
  }
}

} // namespace fsdp::runtime
