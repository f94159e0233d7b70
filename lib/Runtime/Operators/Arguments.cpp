//===- Arguments.cpp - plan arguments as ATen's calling convention --------===//
#include "fsdp/Runtime/Operators/Arguments.h"
#include "fsdp/Runtime/Error.h"

#include <ATen/core/jit_type.h>

namespace fsdp::runtime {

using plan::Arg;
using plan::ArgList;

namespace {

[[noreturn]] void mismatch(const c10::TypePtr &type, const char *got) {
  throw InputError("expected " + type->str() + ", got " + got);
}

const char *kindName(const Arg &arg) {
  struct Visitor {
    const char *operator()(const plan::NoneArg &) { return "None"; }
    const char *operator()(const plan::TensorArg &) { return "a tensor"; }
    const char *operator()(const plan::DeviceArg &) { return "a device"; }
    const char *operator()(bool) { return "a boolean"; }
    const char *operator()(int64_t) { return "an integer"; }
    const char *operator()(double) { return "a float"; }
    const char *operator()(std::complex<double>) { return "a complex number"; }
    const char *operator()(const std::string &) { return "a string"; }
    const char *operator()(const ArgList &) { return "a list"; }
  };
  return std::visit(Visitor{}, arg.value);
}

int64_t asInt(const Arg &arg, const c10::TypePtr &type) {
  if (const auto *value = std::get_if<int64_t>(&arg.value))
    return *value;
  if (const auto *value = std::get_if<bool>(&arg.value))
    return *value;
  mismatch(type, kindName(arg));
}

double asFloat(const Arg &arg, const c10::TypePtr &type) {
  if (const auto *value = std::get_if<double>(&arg.value))
    return *value;
  return double(asInt(arg, type));
}

bool asBool(const Arg &arg, const c10::TypePtr &type) {
  if (const auto *value = std::get_if<bool>(&arg.value))
    return *value;
  if (const auto *value = std::get_if<int64_t>(&arg.value);
      value && (*value == 0 || *value == 1))
    return *value == 1;
  mismatch(type, kindName(arg));
}

c10::Scalar asScalar(const Arg &arg, const c10::TypePtr &type) {
  if (const auto *value = std::get_if<std::complex<double>>(&arg.value))
    return c10::complex<double>(*value);
  if (const auto *value = std::get_if<double>(&arg.value))
    return *value;
  if (const auto *value = std::get_if<bool>(&arg.value))
    return *value;
  return asInt(arg, type);
}

/// The elements of a list argument; a single element stands for all of a
/// fixed-size list (`int[2] stride=1`).
ArgList elements(const Arg &arg, const c10::Argument &formal) {
  if (const auto *list = std::get_if<ArgList>(&arg.value))
    return *list;
  if (formal.N() && !std::holds_alternative<plan::NoneArg>(arg.value))
    return ArgList(size_t(*formal.N()), arg);
  mismatch(formal.type(), kindName(arg));
}

template <typename T, typename Fn>
c10::IValue makeList(const ArgList &items, Fn &&convert) {
  c10::List<T> list;
  list.reserve(items.size());
  for (const Arg &item : items)
    list.push_back(convert(item));
  return list;
}

/// Results that a forward of attention may lack, where the schema of its
/// backward has a tensor. The kernels take an undefined one there, and only
/// there.
bool mayBeUndefined(const c10::Argument &formal) {
  constexpr std::string_view kNames[] = {"cum_seq_q", "cum_seq_k", "attn_bias"};
  return std::find(std::begin(kNames), std::end(kNames), formal.name()) !=
         std::end(kNames);
}

bool isTensor(const c10::TypePtr &type) {
  return type->kind() == c10::TypeKind::TensorType;
}

c10::IValue constantList(const ArgList &items, const c10::TypePtr &element) {
  switch (element->kind()) {
  case c10::TypeKind::IntType:
  case c10::TypeKind::SymIntType:
    return makeList<int64_t>(
        items, [&](const Arg &item) { return asInt(item, element); });
  case c10::TypeKind::FloatType:
    return makeList<double>(
        items, [&](const Arg &item) { return asFloat(item, element); });
  case c10::TypeKind::BoolType:
    return makeList<bool>(
        items, [&](const Arg &item) { return asBool(item, element); });
  case c10::TypeKind::NumberType:
    return makeList<c10::Scalar>(
        items, [&](const Arg &item) { return asScalar(item, element); });
  case c10::TypeKind::StringType:
    return makeList<std::string>(items, [&](const Arg &item) {
      if (const auto *text = std::get_if<std::string>(&item.value))
        return *text;
      mismatch(element, kindName(item));
    });
  default:
    throw InputError("a list of " + element->str() + " is not supported");
  }
}

c10::IValue constantValue(const Arg &arg, const c10::TypePtr &type,
                          c10::Device device) {
  switch (type->kind()) {
  case c10::TypeKind::IntType:
  case c10::TypeKind::SymIntType:
  case c10::TypeKind::ScalarTypeType:
  case c10::TypeKind::LayoutType:
  case c10::TypeKind::MemoryFormatType:
    return asInt(arg, type);
  case c10::TypeKind::FloatType:
    return asFloat(arg, type);
  case c10::TypeKind::BoolType:
    return asBool(arg, type);
  case c10::TypeKind::NumberType:
    return asScalar(arg, type);
  case c10::TypeKind::StringType:
  case c10::TypeKind::AnyType: // the name of a collective's group
    if (const auto *text = std::get_if<std::string>(&arg.value))
      return *text;
    mismatch(type, kindName(arg));
  case c10::TypeKind::DeviceObjType:
    if (std::holds_alternative<plan::DeviceArg>(arg.value))
      return device;
    mismatch(type, kindName(arg));
  default:
    throw InputError("an argument of type " + type->str() +
                     " is not supported");
  }
}

} // namespace

ArgTemplate::ArgTemplate(const Arg &arg, const c10::Argument &formal,
                         c10::Device device) {
  c10::TypePtr type = formal.type();
  if (auto optional = type->cast<c10::OptionalType>()) {
    if (std::holds_alternative<plan::NoneArg>(arg.value))
      return;
    type = optional->getElementType();
  }

  if (isTensor(type)) {
    const auto *tensor = std::get_if<plan::TensorArg>(&arg.value);
    if (std::holds_alternative<plan::NoneArg>(arg.value) &&
        mayBeUndefined(formal)) {
      constant = at::Tensor();
      return;
    }
    if (!tensor)
      mismatch(type, kindName(arg));
    kind = Kind::Tensor;
    ids.push_back(tensor->value);
    return;
  }
  auto list = type->cast<c10::ListType>();
  if (!list) {
    constant = constantValue(arg, type, device);
    return;
  }
  c10::TypePtr element = list->getElementType();
  auto optionalElement = element->cast<c10::OptionalType>();
  bool ofTensors = isTensor(element);
  bool ofOptionalTensors =
      optionalElement && isTensor(optionalElement->getElementType());
  ArgList items = elements(arg, formal);
  if (!ofTensors && !ofOptionalTensors) {
    constant = constantList(items, element);
    return;
  }
  kind = ofTensors ? Kind::TensorList : Kind::OptionalTensorList;
  for (const Arg &item : items) {
    if (const auto *tensor = std::get_if<plan::TensorArg>(&item.value))
      ids.push_back(tensor->value);
    else if (ofOptionalTensors &&
             std::holds_alternative<plan::NoneArg>(item.value))
      ids.push_back(-1);
    else
      mismatch(element, kindName(item));
  }
}

c10::IValue
ArgTemplate::instantiate(const std::vector<at::Tensor> &values) const {
  switch (kind) {
  case Kind::Constant:
    return constant;
  case Kind::Tensor:
    return values[ids[0]];
  case Kind::TensorList: {
    c10::List<at::Tensor> list;
    list.reserve(ids.size());
    for (plan::ValueId id : ids)
      list.push_back(values[id]);
    return list;
  }
  case Kind::OptionalTensorList: {
    c10::List<std::optional<at::Tensor>> list;
    list.reserve(ids.size());
    for (plan::ValueId id : ids)
      list.push_back(id < 0 ? std::nullopt : std::optional(values[id]));
    return list;
  }
  }
  return {};
}

} // namespace fsdp::runtime
