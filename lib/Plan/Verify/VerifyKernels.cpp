//===- VerifyKernels.cpp - calls that run as one --------------------------===//
#include "Verifier.h"
#include "fsdp/Plan/Digest.h"

#include <algorithm>

namespace fsdp::plan {

namespace {

/// What is wrong with a kernel, in words; empty if nothing is.
class KernelDefect {
public:
  explicit KernelDefect(const Kernel &kernel)
      : kernel(kernel), isDefined(kernel.values.size()) {}

  std::string run() {
    size_t operands = size_t(kernel.operands);
    if (operands > kernel.values.size() || kernel.calls.empty() ||
        kernel.results.empty())
      return "expected operands among its values, a call and a result";
    for (const Value &value : kernel.values)
      if (value.storage != -1 || value.offset != -1)
        return "expected values with storage of their own and no offset";
    for (const Value &value : kernel.values)
      if (!value.strides.empty() && value.strides.size() != value.shape.size())
        return "expected a stride for each of the " +
               std::to_string(value.shape.size()) + " dimensions, got " +
               std::to_string(value.strides.size());
    std::fill_n(isDefined.begin(), operands, true);
    for (const Call &call : kernel.calls)
      if (!takes(call))
        return "expected calls of ATen's operators that define each value "
               "before its use and once, and write none, got " +
               quote(call.op);
    for (ValueId result : kernel.results)
      if (!isValue(result) || result < kernel.operands || !isDefined[result])
        return "expected results that its calls define, got value " +
               std::to_string(result);
    const Value &first = kernel.values[size_t(kernel.results.front())];
    for (ValueId result : kernel.results)
      if (const Value &value = kernel.values[size_t(result)];
          value.shape != first.shape || value.strides != first.strides ||
          !areDense(value.shape, fullStrides(value.shape, value.strides)) ||
          std::count(value.strides.begin(), value.strides.end(), 0) > 0)
        return "expected dense results of one shape and layout, got value " +
               std::to_string(result);
    for (const KernelCode &code : kernel.code)
      if (std::string defect = findDefect(code); !defect.empty())
        return defect;
    return "";
  }

private:
  bool isValue(ValueId value) const {
    return value >= 0 && size_t(value) < kernel.values.size();
  }

  bool takes(const Call &call) {
    if (!call.op.starts_with("aten::") || !call.schema.empty() ||
        !call.mutates.empty() || call.reduceInputOf != -1)
      return false;
    for (ValueId operand : getOperands(call))
      if (!isValue(operand) || !isDefined[operand])
        return false;
    for (ValueId out : call.outs) {
      if (out == -1)
        continue;
      if (!isValue(out) || isDefined[out])
        return false;
      isDefined[out] = true;
    }
    return true;
  }

  std::string findDefect(const KernelCode &code) const {
    if (std::count_if(kernel.code.begin(), kernel.code.end(),
                      [&](const KernelCode &other) {
                        return other.target == code.target;
                      }) > 1)
      return "expected one code for " + quote(code.target);
    if (code.entry >= int64_t(code.image.size()))
      return "expected the entry of the code for " + quote(code.target) +
             " in its " + std::to_string(code.image.size()) + " bytes, got " +
             std::to_string(code.entry);
    std::string hash = hashOf(kernel, code);
    if (code.hash != hash)
      return "expected the code for " + quote(code.target) + " to have hash " +
             quote(code.hash) + ", got " + quote(hash) +
             ": code or calls are not those that were written";
    return "";
  }

  const Kernel &kernel;
  std::vector<bool> isDefined;
};

} // namespace

void Verifier::verifyKernel(const Kernel &kernel) const {
  if (std::string defect = KernelDefect(kernel).run(); !defect.empty())
    fail("P42", "kernel " + quote(kernel.name) + ": " + defect);
}

void Verifier::visit(const Fused &fused) {
  const Kernel &kernel = plan.kernels[size_t(fused.kernel)];
  std::string of = "kernel " + quote(kernel.name);
  checkSize(fused.ins.size(), size_t(kernel.operands), "operands");
  checkSize(fused.outs.size(), kernel.results.size(), "results");
  for (size_t i = 0; i < fused.ins.size(); ++i) {
    useOperand(fused.ins[i]);
    checkSpec(fused.ins[i], kernel.values[i], "P43", "an operand of " + of);
  }
  for (size_t i = 0; i < fused.outs.size(); ++i) {
    ValueId out = fused.outs[i];
    define(out);
    checkSpec(out, kernel.values[size_t(kernel.results[i])], "P43",
              "a result of " + of);
    const Value &result = kernel.values[size_t(kernel.results[i])];
    if (plan.values[out].strides != result.strides)
      fail("P43", "expected value " + std::to_string(out) + ", a result of " +
                      of + ", to have strides " + describe(result.strides) +
                      ", got " + describe(plan.values[out].strides));
  }
}

} // namespace fsdp::plan
