//===- ReadPlan.cpp - bounded, strict reading of plan JSON ----------------===//
//
// The tree of JSON is decoded by the fields of the structs (Fields.h), so that
// unknown and missing keys are errors that name their JSON path.
//
//===----------------------------------------------------------------------===//
#include "JsonCursor.h"
#include "fsdp/Plan/Digest.h"
#include "fsdp/Support/Files.h"

namespace fsdp::plan {

namespace {

/// What a field says of its contents.
struct Contents {
  Role role = Role::Plain;
  int64_t least = 0, most = 0; ///< of integers
  bool mayBeNull = false;      ///< what may be none, and is not left out
};

Arg decodeArg(const Cursor &c) {
  const Json &node = c.json();
  if (node.is_null())
    return {NoneArg{}};
  if (node.is_boolean())
    return {c.boolean()};
  if (node.is_number_integer())
    return {c.integer()};
  if (node.is_number_float())
    return {c.real()};
  if (node.is_string())
    return {c.string()};
  if (node.is_array())
    return {c.list(decodeArg)};
  if (c.has("t")) {
    c.keys({"t"});
    return {TensorArg{c.at("t").index()}};
  }
  if (c.has("device")) {
    c.keys({"device"});
    if (!c.at("device").boolean())
      c.at("device").error("expected true, got false");
    return {DeviceArg{}};
  }
  if (c.has("c")) {
    c.keys({"c"});
    auto parts = c.at("c").list([](const Cursor &part) { return part.real(); });
    if (parts.size() != 2)
      c.at("c").error("expected a real and an imaginary part, got " +
                      std::to_string(parts.size()) + " numbers");
    return {std::complex<double>(parts[0], parts[1])};
  }
  return {c.real()};
}

std::string decodeHex(const Cursor &c) {
  const std::string &text = c.string();
  if (text.size() % 2)
    c.error("expected an even number of hex digits, got " +
            std::to_string(text.size()));
  auto digit = [&](char ch) -> int {
    if (ch >= '0' && ch <= '9')
      return ch - '0';
    if (ch >= 'a' && ch <= 'f')
      return ch - 'a' + 10;
    c.error("expected lower-case hex digits, got " + Json(text).dump());
  };
  std::string bytes(text.size() / 2, '\0');
  for (size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = char(digit(text[2 * i]) << 4 | digit(text[2 * i + 1]));
  return bytes;
}

/// One of `count` values by its name.
template <typename EnumT>
EnumT decodeName(const Cursor &c, size_t count,
                 std::string_view (&nameOf)(EnumT), const char *what) {
  for (size_t i = 0; i < count; ++i)
    if (c.string() == nameOf(EnumT(i)))
      return EnumT(i);
  c.error("expected a " + std::string(what) + ", got \"" + c.string() + "\"");
}

// read() takes a value of each type from a node of the tree.

void read(const Cursor &c, bool &value, Contents) { value = c.boolean(); }
void read(const Cursor &c, double &value, Contents) { value = c.real(); }
void read(const Cursor &c, int32_t &value, Contents) { value = c.index(); }
void read(const Cursor &c, int64_t &value, Contents contents) {
  value = c.integer(contents.least, contents.most);
}
void read(const Cursor &c, std::string &value, Contents contents) {
  value = contents.role == Role::Hex ? decodeHex(c) : c.string();
  if (contents.role == Role::Text && value.empty())
    c.error("expected a non-empty string, got \"\"");
}
void read(const Cursor &c, DType &value, Contents) {
  auto dtype = parseDType(c.string());
  if (!dtype)
    c.error("expected a dtype, got \"" + c.string() + "\"");
  value = *dtype;
}
void read(const Cursor &c, Stream &value, Contents) {
  value = decodeName(c, kNumStreams, streamName, "stream");
}
void read(const Cursor &c, When &value, Contents) {
  value = decodeName(c, kNumWhens, whenName, "microbatch");
}
void read(const Cursor &c, OperatorName &value, Contents) {
  const std::string &name = c.string();
  size_t dot = name.find('.');
  value.op = name.substr(0, dot);
  if (dot != std::string::npos)
    value.overload = name.substr(dot + 1);
  if (value.op.find("::") == std::string::npos ||
      (dot != std::string::npos && value.overload.empty()))
    c.error("expected namespace::name[.overload], got \"" + name + "\"");
}
void read(const Cursor &c, Arg &value, Contents) { value = decodeArg(c); }
void read(const Cursor &c, std::map<std::string, double> &value, Contents) {
  c.members([&](const std::string &name, const Cursor &member) {
    value[name] = member.real();
  });
}
void read(const Cursor &c, Numerics &value, Contents) {
  c.members([&](const std::string &name, const Cursor &member) {
    value[name] = member.string();
  });
}
void read(const Cursor &c, Instruction &value, Contents contents);
template <HasFields StructT>
void read(const Cursor &c, StructT &value, Contents);
template <typename T>
void read(const Cursor &c, std::optional<T> &value, Contents contents) {
  if (!contents.mayBeNull || !c.json().is_null())
    read(c, value.emplace(), contents);
}
template <typename T>
void read(const Cursor &c, std::vector<T> &value, Contents contents) {
  value = c.list([&](const Cursor &item) {
    T element{};
    read(item, element, contents);
    return element;
  });
}

/// The struct that a field holds, if it holds one.
template <typename T> struct Held {
  using Struct = T;
};
template <typename T> struct Held<std::optional<T>> {
  using Struct = T;
};
template <typename StructT, typename FieldT>
using HeldBy =
    typename Held<std::remove_cvref_t<decltype(std::declval<FieldT>().in(
        std::declval<StructT &>()))>>::Struct;

template <HasFields StructT>
void appendKeys(std::vector<Cursor::Key> &keys, bool areRequired = true) {
  forEachField<StructT>([&]<typename FieldT>(const FieldT &field) {
    bool isRequired = areRequired && !FieldT::isOptional;
    if constexpr (HasFields<HeldBy<StructT, FieldT>>)
      if (field.isInlined())
        return appendKeys<HeldBy<StructT, FieldT>>(keys, isRequired);
    keys.push_back({field.key, isRequired});
  });
}

void verifyBytes(const Cursor &c, const TensorSpec &spec) {
  int64_t bytes = 1;
  c.at("shape").each([&](const Cursor &extent) {
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(extent.integer(), 1),
                               &bytes))
      extent.error("tensor too large");
  });
  if (__builtin_mul_overflow(bytes, byteWidth(spec.dtype), &bytes))
    c.at("shape").error("tensor too large");
}

/// Reads the fields of an object whose keys have been checked.
template <HasFields StructT> void readFields(const Cursor &c, StructT &value) {
  forEachField<StructT>([&]<typename FieldT>(const FieldT &field) {
    auto &member = field.in(value);
    using Inner = HeldBy<StructT, FieldT>;
    if constexpr (HasFields<Inner>)
      if (field.isInlined()) {
        if constexpr (HasFields<std::remove_cvref_t<decltype(member)>>) {
          readFields(c, member);
        } else {
          bool isThere = false;
          forEachField<Inner>(
              [&](const auto &inner) { isThere |= c.has(inner.key); });
          if (isThere)
            readFields(c, member.emplace());
        }
        return;
      }
    if (!FieldT::isOptional || c.has(field.key))
      read(c.at(field.key), member,
           {field.role, field.least, field.most, !FieldT::isOptional});
  });
  if constexpr (std::is_same_v<StructT, TensorSpec>)
    verifyBytes(c, value);
}

template <HasFields StructT>
void read(const Cursor &c, StructT &value, Contents) {
  static const std::vector<Cursor::Key> keys = [] {
    std::vector<Cursor::Key> all;
    appendKeys<StructT>(all);
    return all;
  }();
  c.keys(keys);
  readFields(c, value);
}

/// The keys of an instruction: its kind's, the phase, and those of all kinds.
template <typename KindT> std::vector<Cursor::Key> keysOfKind(bool hasPhase) {
  std::vector<Cursor::Key> keys, common;
  appendKeys<KindT>(keys);
  if (hasPhase)
    keys.push_back({"phase"});
  appendKeys<Instruction>(common);
  if constexpr (std::is_same_v<KindT, Wait>) {
    // It computes nothing, and its events stand under its verb.
    keys.push_back({KindT::verb});
    std::erase_if(common, [](const Cursor::Key &key) {
      return key.name != "module" && key.name != "frees" &&
             key.name != "records" && key.name != "when";
    });
  }
  keys.insert(keys.end(), common.begin(), common.end());
  return keys;
}

template <typename KindT>
void readKind(const Cursor &c, Instruction &instruction, bool hasPhase) {
  static const std::vector<Cursor::Key> keys[] = {keysOfKind<KindT>(false),
                                                  keysOfKind<KindT>(true)};
  c.keys(keys[hasPhase]);
  readFields(c, instruction.kind.emplace<KindT>());
  readFields(c, instruction);
  if constexpr (std::is_same_v<KindT, Wait>)
    read(c.at(KindT::verb), instruction.waits, {});
}

void read(const Cursor &c, Instruction &value, Contents contents) {
  if (!c.isObject())
    c.expected("an object");
  bool hasPhase = contents.role == Role::Steps, isKnown = false;
  forEachKind([&]<typename KindT>(const KindT &) {
    if (isKnown || !c.has(KindT::verb))
      return;
    isKnown = true;
    readKind<KindT>(c, value, hasPhase);
  });
  if (!isKnown) {
    std::string verbs;
    size_t left = std::variant_size_v<Kind>;
    forEachKind([&]<typename KindT>(const KindT &) {
      verbs += KindT::verb;
      verbs += --left == 0 ? "" : left == 1 ? " or " : ", ";
    });
    c.error("expected an instruction (" + verbs + ")");
  }
  if (hasPhase)
    value.phase = decodeName(c.at("phase"), kNumPhases, phaseName, "phase");
}

Plan decodePlan(const Cursor &c) {
  // The version comes first: a plan of another version has other keys.
  if (int64_t version = c.at("version").integer(); version != kPlanVersion)
    c.at("version").error("expected plan version " +
                          std::to_string(kPlanVersion) + ", got " +
                          std::to_string(version) +
                          "; compile the model again with this fsdp-opt");
  std::vector<Cursor::Key> keys = {{"version"}, {"digest", false}};
  appendKeys<Plan>(keys);
  c.keys(keys);
  Plan plan;
  readFields(c, plan);
  return plan;
}

/// Checks that the plan is the one that was written. A plan that was changed on
/// purpose has no digest.
void verifyDigest(const Cursor &c, const Plan &plan) {
  if (!c.has("digest"))
    return;
  const std::string &given = c.at("digest").string();
  if (std::string digest = digestOf(plan); given != digest)
    c.at("digest").error("expected \"" + digest + "\", got \"" + given +
                         "\": the plan is not the one that was written");
}

} // namespace

Plan parsePlan(std::string_view json, const std::string &origin) {
  if (json.size() > kMaxJsonBytes)
    throw PlanError(origin + ": expected at most " +
                    std::to_string(kMaxJsonBytes) + " bytes, got " +
                    std::to_string(json.size()));
  Json tree = parseJson(json, origin);
  Plan plan = decodePlan(Cursor(tree, origin));
  verifyPlan(plan, origin);
  verifyDigest(Cursor(tree, origin), plan);
  return plan;
}

Plan readPlan(const std::string &path) {
  std::string text;
  if (std::string error = readFile(path, kMaxJsonBytes, text); !error.empty())
    throw PlanError(path + ": " + error);
  return parsePlan(text, path);
}

} // namespace fsdp::plan
