//===- KernelCheck.cpp - whether a kernel does what its schema says -------===//
#include "fsdp/Runtime/Operators/KernelCheck.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Memory/Layout.h"
#include "fsdp/Support/Hash.h"

#include <c10/util/StringUtil.h>

#include <cstring>
#include <utility>

namespace fsdp::runtime {

namespace {

using Bytes = std::pair<const char *, const char *>;

/// What a tensor's storage has.
Bytes storageBytes(const at::Tensor &tensor) {
  if (!tensor.defined() || !tensor.has_storage())
    return {nullptr, nullptr};
  auto *begin = static_cast<const char *>(tensor.storage().data());
  return {begin, begin + tensor.storage().nbytes()};
}

bool overlap(const Bytes &a, const Bytes &b) {
  return a.first < b.second && b.first < a.second;
}

/// From the first to the last of a tensor's elements.
std::string hashOf(const at::Tensor &tensor) {
  if (!tensor.defined() || !tensor.has_storage() || !tensor.device().is_cpu() ||
      tensor.numel() == 0)
    return "";
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d)
    last += (tensor.size(d) - 1) * tensor.stride(d);
  return hashBytes({static_cast<const char *>(tensor.const_data_ptr()),
                    size_t(last + 1) * tensor.element_size()});
}

/// Where a tensor lies, and how.
std::string layoutOf(const at::Tensor &tensor) {
  if (!tensor.defined() || !tensor.has_storage())
    return "";
  return c10::str(tensor.sizes(), tensor.strides(), tensor.const_data_ptr());
}

std::string describe(std::string_view dtype, at::IntArrayRef shape,
                     at::IntArrayRef strides) {
  return c10::str(dtype, shape, " of strides ", strides);
}

} // namespace

KernelCheck::Generator KernelCheck::Generator::now() {
  auto *own = at::check_generator<at::CPUGeneratorImpl>(
      at::detail::getDefaultCPUGenerator());
  return {own->engine().data(), own->next_float_normal_sample(),
          own->next_double_normal_sample()};
}

bool KernelCheck::Generator::operator==(const Generator &other) const {
  return engine.seed_ == other.engine.seed_ &&
         engine.left_ == other.engine.left_ &&
         engine.next_ == other.engine.next_ &&
         engine.state_ == other.engine.state_ && nextFloat == other.nextFloat &&
         nextDouble == other.nextDouble;
}

KernelCheck::KernelCheck(const plan::Plan &plan, const plan::Call &call,
                         const c10::OperatorHandle &handle)
    : plan(plan), call(call),
      isRandom(handle.hasTag(at::Tag::nondeterministic_seeded)) {
  const c10::FunctionSchema &schema = handle.schema();
  for (size_t i = 0; i < call.args.size(); ++i)
    addOperands(call.args[i], schema.arguments()[i]);
}

void KernelCheck::addOperands(const plan::Arg &arg,
                              const c10::Argument &formal) {
  if (const auto *list = std::get_if<plan::ArgList>(&arg.value))
    for (const plan::Arg &element : *list)
      addOperands(element, formal);
  if (const auto *tensor = std::get_if<plan::TensorArg>(&arg.value))
    operands.push_back({formal.name(), tensor->value,
                        formal.alias_info() && formal.alias_info()->isWrite()});
}

void KernelCheck::before(const std::vector<at::Tensor> &values) {
  if (runs++ > 0)
    return;
  for (Operand &operand : operands) {
    operand.layout = layoutOf(values[operand.value]);
    operand.hash = hashOf(values[operand.value]);
  }
  if (!isRandom)
    generator = Generator::now();
}

void KernelCheck::after(const std::vector<at::Tensor> &values) {
  for (size_t i = 0; i < call.outs.size(); ++i)
    if (call.outs[i] != -1)
      checkType(i, values[call.outs[i]]);
  checkMemory(values);
  if (runs == 1)
    checkFirstRun(values);
}

void KernelCheck::checkType(size_t result, const at::Tensor &got) const {
  const plan::Value &want = plan.values[call.outs[result]];
  auto fail = [&](const std::string &what) {
    plan::Strides strides = plan::fullStrides(want.shape, want.strides);
    throw RunError("result " + std::to_string(result) + ": expected " +
                   describe(plan::dtypeName(want.dtype), want.shape, strides) +
                   " as its fake kernel says, got " + what);
  };
  if (!got.defined()) {
    // What a plan has in place of a missing result.
    if (want.shape.empty() && want.dtype == plan::DType::Float32)
      return;
    fail("nothing");
  }
  if (got.layout() != at::kStrided)
    fail("a tensor of layout " + c10::str(got.layout()));
  if (got.scalar_type() == scalarType(want.dtype) &&
      got.sizes() == want.shape && isLaidOut(got, want.strides))
    return;
  fail(describe(c10::getDtypeNames(got.scalar_type()).first, got.sizes(),
                got.strides()));
}

plan::ValueId KernelCheck::storageOf(plan::ValueId value) const {
  plan::ValueId storage = plan.values[value].storage;
  return storage == -1 ? value : storage;
}

void KernelCheck::checkMemory(const std::vector<at::Tensor> &values) const {
  for (size_t i = 0; i < call.outs.size(); ++i) {
    plan::ValueId out = call.outs[i];
    if (out == -1)
      continue;
    Bytes bytes = storageBytes(values[out]);
    auto shares = [&](plan::ValueId other) {
      return storageOf(other) != storageOf(out) &&
             overlap(bytes, storageBytes(values[other]));
    };
    auto fail = [&](const std::string &other) {
      throw RunError("result " + std::to_string(i) + " shares memory with " +
                     other +
                     ", expected new memory: its schema does not say so, as "
                     "Tensor(a) does");
    };
    for (const Operand &operand : operands)
      if (shares(operand.value))
        fail("argument \"" + operand.name + "\"");
    for (size_t k = 0; k < i; ++k)
      if (call.outs[k] != -1 && shares(call.outs[k]))
        fail("result " + std::to_string(k));
  }
}

void KernelCheck::checkFirstRun(const std::vector<at::Tensor> &values) const {
  auto isWritten = [&](const at::Tensor &tensor) {
    for (const Operand &operand : operands)
      if (operand.written &&
          overlap(storageBytes(tensor), storageBytes(values[operand.value])))
        return true;
    return false;
  };
  for (const Operand &operand : operands)
    if (!isWritten(values[operand.value]) &&
        hashOf(values[operand.value]) != operand.hash)
      throw RunError("argument \"" + operand.name +
                     "\" was written, expected it as it was: its schema does "
                     "not say so, as Tensor(a!) does");
  for (const Operand &operand : operands)
    if (layoutOf(values[operand.value]) != operand.layout)
      throw RunError("argument \"" + operand.name +
                     "\" has another shape, strides or memory than before, "
                     "expected them as they were");
  if (generator && !(*generator == Generator::now()))
    throw RunError("drew random numbers, expected none: it lacks the tag "
                   "nondeterministic_seeded");
}

} // namespace fsdp::runtime
