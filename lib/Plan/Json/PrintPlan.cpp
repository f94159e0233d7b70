//===- PrintPlan.cpp - the JSON form of a plan ----------------------------===//
#include "fsdp/Plan/Digest.h"
#include "fsdp/Plan/Plan.h"
#include "fsdp/Support/Hash.h"

#include <nlohmann/json.hpp>

#include <array>
#include <charconv>
#include <cmath>
#include <utility>

namespace fsdp::plan {

namespace {

struct PrintedPlan {
  std::string text;
  std::string digest;
};

class Printer {
public:
  PrintedPlan print(const Plan &plan);
  std::string textOf(const Kernel &kernel) {
    print(kernel);
    return std::move(out);
  }

private:
  void raw(std::string_view text) { out.append(text); }
  void string(std::string_view text);
  void real(double value);
  void hex(std::string_view bytes);

  // print() writes a value of each type.
  void print(bool value) { raw(value ? "true" : "false"); }
  void print(int32_t value) { out += std::to_string(value); }
  void print(int64_t value) { out += std::to_string(value); }
  void print(double value) { real(value); }
  void print(const std::string &value) { string(value); }
  void print(DType value) { string(dtypeName(value)); }
  void print(Stream value) { string(streamName(value)); }
  void print(When value) { string(whenName(value)); }
  void print(const OperatorName &name) {
    string(name.overload.empty() ? name.op : name.op + "." + name.overload);
  }
  void print(NoneArg) { raw("null"); }
  void print(DeviceArg) { raw("{\"device\": true}"); }
  void print(TensorArg tensor) {
    raw("{\"t\": ");
    print(tensor.value);
    raw("}");
  }
  void print(std::complex<double> value) {
    raw("{\"c\": ");
    print(std::vector<double>{value.real(), value.imag()});
    raw("}");
  }
  void print(const Arg &arg) {
    std::visit([&](const auto &value) { print(value); }, arg.value);
  }
  template <typename T> void print(const std::map<std::string, T> &members) {
    raw("{");
    bool isFirst = true;
    for (const auto &[name, value] : members) {
      if (!std::exchange(isFirst, false))
        raw(", ");
      string(name);
      raw(": ");
      print(value);
    }
    raw("}");
  }
  void print(const Instruction &instruction, bool hasPhase);
  template <typename T> void print(const std::optional<T> &value) {
    if (value)
      print(*value);
    else
      raw("null");
  }
  template <typename T> void print(const std::vector<T> &list) {
    raw("[");
    for (size_t i = 0; i < list.size(); ++i) {
      if (i)
        raw(", ");
      print(list[i]);
    }
    raw("]");
  }
  template <HasFields StructT> void print(const StructT &value) {
    raw("{");
    bool isFirst = true;
    fields(value, isFirst);
    raw("}");
  }

  /// The key of an object's member; `isFirst` becomes false.
  void key(std::string_view name, bool &isFirst) {
    raw(std::exchange(isFirst, false) ? "\"" : ", \"");
    raw(name);
    raw("\": ");
  }
  /// The fields of a struct, except for optional ones with the value of a new
  /// struct.
  template <typename StructT> void fields(const StructT &value, bool &isFirst);
  /// A member of the plan: one line, or for a table one for each row.
  template <typename T> void member(const T &value, Role) { print(value); }
  template <typename T> void member(const std::vector<T> &list, Role role) {
    raw("[");
    for (size_t i = 0; i < list.size(); ++i) {
      raw(i ? ",\n    " : "\n    ");
      if constexpr (std::is_same_v<T, Instruction>)
        print(list[i], role == Role::Steps);
      else
        print(list[i]);
    }
    raw(list.empty() ? "]" : "\n  ]");
  }

  std::string out;
};

void Printer::string(std::string_view text) {
  try {
    out += nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception &) {
    throw PlanError("plan: expected utf-8 in names, got other bytes");
  }
}

void Printer::real(double value) {
  if (!std::isfinite(value)) {
    raw("{\"f\": ");
    raw(std::isnan(value) ? "\"nan\"" : value < 0 ? "\"-inf\"" : "\"inf\"");
    raw("}");
    return;
  }
  std::array<char, 40> buffer;
  auto end =
      std::to_chars(buffer.data(), buffer.data() + buffer.size(), value).ptr;
  std::string_view text(buffer.data(), end - buffer.data());
  raw(text);
  // A float must stay recognisable as one.
  if (text.find_first_of(".e") == std::string_view::npos)
    raw(".0");
}

void Printer::hex(std::string_view bytes) {
  constexpr std::string_view digits = "0123456789abcdef";
  raw("\"");
  for (unsigned char byte : bytes) {
    out += digits[byte >> 4];
    out += digits[byte & 15];
  }
  raw("\"");
}

template <typename StructT>
void Printer::fields(const StructT &value, bool &isFirst) {
  forEachField<StructT>([&]<typename FieldT>(const FieldT &field) {
    const auto &member = field.in(value);
    using Member = std::remove_cvref_t<decltype(member)>;
    if constexpr (FieldT::isOptional) {
      static const StructT newOne{};
      if (member == field.in(newOne))
        return;
    }
    if constexpr (HasFields<Member>)
      if (field.isInlined())
        return fields(member, isFirst);
    if constexpr (requires {
                    requires HasFields<typename Member::value_type>;
                    member.has_value();
                  } && FieldT::isOptional)
      if (field.isInlined())
        return fields(*member, isFirst);
    key(field.key, isFirst);
    if constexpr (std::is_same_v<Member, std::string>)
      if (field.role == Role::Hex)
        return hex(member);
    print(member);
  });
}

void Printer::print(const Instruction &instruction, bool hasPhase) {
  raw("{");
  bool isFirst = true;
  std::visit(
      [&]<typename KindT>(const KindT &kind) {
        fields(kind, isFirst);
        if constexpr (std::is_same_v<KindT, Wait>) {
          key(KindT::verb, isFirst);
          print(instruction.waits);
        }
      },
      instruction.kind);
  if (hasPhase) {
    key("phase", isFirst);
    string(phaseName(instruction.phase));
  }
  if (std::holds_alternative<Wait>(instruction.kind)) {
    Instruction others = instruction;
    others.waits.clear();
    fields(others, isFirst);
  } else {
    fields(instruction, isFirst);
  }
  raw("}");
}

PrintedPlan Printer::print(const Plan &plan) {
  raw("{\n  \"version\": ");
  print(plan.version);
  static const Plan newOne;
  forEachField<Plan>([&]<typename FieldT>(const FieldT &field) {
    if constexpr (FieldT::isOptional)
      if (field.in(plan) == field.in(newOne))
        return;
    raw(",\n  \"");
    raw(field.key);
    raw("\": ");
    member(field.in(plan), field.role);
  });
  std::string digest = hashBytes(out);
  raw(",\n  \"digest\": ");
  string(digest);
  raw("\n}\n");
  return {std::move(out), std::move(digest)};
}

} // namespace

std::string hashOf(const Kernel &kernel, const KernelCode &code) {
  Kernel alone = kernel;
  alone.code = {code};
  alone.code.front().hash.clear();
  return hashBytes(Printer().textOf(alone));
}

std::string printPlan(const Plan &plan) { return Printer().print(plan).text; }

std::string digestOf(const Plan &plan) { return Printer().print(plan).digest; }

} // namespace fsdp::plan
