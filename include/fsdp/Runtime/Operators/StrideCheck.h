//===- StrideCheck.h - results against the strides of the plan --*- C++ -*-===//
//
// A captured program relies on the strides of results: whether something is a
// view, and what as_strided reads. An operator that gives different strides in
// a run than at capture is harmless until a call depends on them.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_OPERATORS_STRIDECHECK_H
#define FSDP_RUNTIME_OPERATORS_STRIDECHECK_H

#include "fsdp/Plan/Plan.h"

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

namespace fsdp::runtime {

/// Follows the first run of a list of calls.
class StrideCheck {
public:
  /// Borrows the plan.
  explicit StrideCheck(const plan::Plan &plan) : plan(plan) {}

  /// For a call that is about to run: one line that says which of its operands
  /// has other strides than the plan says; empty if none has.
  std::string explain(const plan::Call &call) const;
  /// Throws RunError where the call reads storage by strides (as_strided, or an
  /// operator that is not ATen's) and the strides of its operand, or of the
  /// operand's storage, differ from the plan's.
  void beforeCall(const plan::Call &call) const;
  /// Notes the results of the instruction, which is `call`.
  void afterCall(const plan::Instruction &instruction, const plan::Call &call,
                 const std::vector<at::Tensor> &values);

private:
  std::string explain(plan::ValueId value) const;

  const plan::Plan &plan;
  /// By value: who made it, and its strides, where they are not the plan's.
  std::map<plan::ValueId, std::string> strays;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_OPERATORS_STRIDECHECK_H
