//===- Operators.cpp - the operators that a plan may call -----------------===//
#include "fsdp/Runtime/Operators/Operators.h"
#include "fsdp/Plan/ModelCollectives.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Operators/CallTable.h"

#include <ATen/core/jit_type.h>
#include <torch/version.h>

#include <algorithm>
#include <mutex>
#include <set>

namespace fsdp::runtime {

namespace {

constexpr char kNamespace[] = "aten";

struct Allowed {
  std::mutex lock;
  std::set<std::string> names;
};
Allowed &allowed() {
  static Allowed instance;
  return instance;
}

std::string qualified(const std::string &name, const std::string &overload) {
  return name + (overload.empty() ? "" : "." + overload);
}

bool isAllowed(const c10::FunctionSchema &schema) {
  Allowed &all = allowed();
  std::lock_guard guard(all.lock);
  return all.names.contains(qualified(schema.name(), schema.overload_name()));
}

/// What a list or an optional is of.
c10::TypePtr elementType(c10::TypePtr type) {
  for (;;) {
    if (auto optional = type->cast<c10::OptionalType>())
      type = optional->getElementType();
    else if (auto list = type->cast<c10::ListType>())
      type = list->getElementType();
    else
      return type;
  }
}

bool isOf(const c10::Argument &argument, c10::TypeKind kind) {
  return elementType(argument.type())->kind() == kind;
}

bool isPlain(const c10::Argument &argument) {
  switch (elementType(argument.type())->kind()) {
  case c10::TypeKind::TensorType:
  case c10::TypeKind::IntType:
  case c10::TypeKind::SymIntType:
  case c10::TypeKind::FloatType:
  case c10::TypeKind::SymFloatType:
  case c10::TypeKind::BoolType:
  case c10::TypeKind::SymBoolType:
  case c10::TypeKind::NumberType:
  case c10::TypeKind::ScalarTypeType:
  case c10::TypeKind::LayoutType:
  case c10::TypeKind::MemoryFormatType:
  case c10::TypeKind::StringType:
  case c10::TypeKind::AnyType: // a plan gives the name of a collective's group
  case c10::TypeKind::DeviceObjType:
  // A plan has no notation for one; it is absent.
  case c10::TypeKind::GeneratorType:
    return true;
  default:
    return false;
  }
}

} // namespace

bool isThisTorch(std::string_view version) {
  std::string_view own = TORCH_VERSION;
  return own == version ||
         (!version.empty() && own.starts_with(std::string(version) + "."));
}

std::string reasonToRefuse(const c10::FunctionSchema &schema) {
  if (plan::isModelCollective(schema.name()) && !isAllowed(schema))
    return "it communicates with ranks that the plan does not have; only the "
           "Python process that captured it can run it";
  if (schema.getNamespace() != kNamespace && !isAllowed(schema))
    return std::string("expected an operator of namespace \"") + kNamespace +
           "\", or of a library that is given with --load";
  for (const auto *list : {&schema.arguments(), &schema.returns()})
    for (const c10::Argument &argument : *list)
      if (!isPlain(argument))
        return "expected an operator on tensors, got one with a " +
               elementType(argument.type())->str();
  auto isTensor = [](const c10::Argument &argument) {
    return isOf(argument, c10::TypeKind::TensorType);
  };
  bool reads = std::any_of(schema.arguments().begin(), schema.arguments().end(),
                           [&](const c10::Argument &argument) {
                             return isTensor(argument) && !argument.is_out();
                           });
  if (reads)
    return "";
  for (const c10::Argument &argument : schema.arguments())
    if (isOf(argument, c10::TypeKind::StringType))
      return "expected an operator that reads a tensor, got one that uses "
             "what the string \"" +
             argument.name() + "\" names";
  if (std::none_of(schema.returns().begin(), schema.returns().end(), isTensor))
    return "expected an operator that reads or returns a tensor";
  return "";
}

void allowOperators(const std::vector<std::string> &names) {
  Allowed &all = allowed();
  std::lock_guard guard(all.lock);
  all.names.insert(names.begin(), names.end());
}

/// Of an operator that LibTorch does not bring along.
static void checkForeign(const plan::Call &call,
                         const c10::OperatorHandle &handle) {
  std::string schema = c10::str(handle.schema());
  if (schema != call.schema)
    throw InputError("expected the schema \"" + call.schema +
                     "\" as captured, got \"" + schema + "\"");
  if (!handle.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU) &&
      !handle.hasComputedKernelForDispatchKey(c10::DispatchKey::CUDA))
    throw InputError("the loaded libraries have no kernel for it");
}

/// P35 rests on what a plan says is written.
static void checkWrites(const plan::Call &call,
                        const c10::FunctionSchema &schema) {
  auto check = [&](const plan::Arg &arg, const std::string &name) {
    const auto *tensor = std::get_if<plan::TensorArg>(&arg.value);
    if (tensor && std::find(call.mutates.begin(), call.mutates.end(),
                            tensor->value) == call.mutates.end())
      throw InputError("argument \"" + name + "\" is written, expected value " +
                       std::to_string(tensor->value) + " in \"mutates\"");
  };
  for (size_t i = 0; i < std::min(call.args.size(), schema.arguments().size());
       ++i) {
    const c10::Argument &formal = schema.arguments()[i];
    if (!formal.alias_info() || !formal.alias_info()->isWrite())
      continue;
    check(call.args[i], formal.name());
    if (const auto *list = std::get_if<plan::ArgList>(&call.args[i].value))
      for (const plan::Arg &element : *list)
        check(element, formal.name());
  }
}

c10::OperatorHandle findOperator(const plan::Call &call) {
  std::string name = qualified(call.op, call.overload);
  auto handle =
      c10::Dispatcher::singleton().findSchema({call.op, call.overload});
  if (!handle && !call.schema.empty())
    throw InputError("no C++ kernel of operator \"" + name +
                     "\" in the libraries that are loaded; expected --load "
                     "with the library that registers it");
  if (!handle)
    throw InputError("no operator \"" + name + "\" in this LibTorch");
  if (std::string reason = reasonToRefuse(handle->schema()); !reason.empty())
    throw InputError("a plan may not call \"" + name + "\": " + reason);
  if (!call.schema.empty())
    checkForeign(call, *handle);
  checkWrites(call, handle->schema());
  return *handle;
}

void checkOperators(const plan::Plan &plan, const std::string &path) {
  for (const plan::Kernel &kernel : plan.kernels)
    for (const plan::Call &call : kernel.calls)
      try {
        findOperator(call);
      } catch (const InputError &error) {
        throw InputError(path + ": kernel \"" + kernel.name + "\": " + call.op +
                         ": " + error.what());
      }
  for (const auto *program : {&plan.init, &plan.evaluation, &plan.instructions})
    for (size_t i = 0; i < program->size(); ++i) {
      const auto *call = std::get_if<plan::Call>(&(*program)[i].kind);
      if (!call)
        continue;
      try {
        findOperator(*call);
      } catch (const InputError &error) {
        throw InputError(path + ": instruction " + std::to_string(i) + ": " +
                         describeInstruction(plan, (*program)[i]) + ": " +
                         error.what());
      }
    }
}

} // namespace fsdp::runtime
