//===- Profile.cpp - measured seconds of a plan's instructions ------------===//
#include "fsdp/Plan/Profile.h"
#include "JsonCursor.h"
#include "fsdp/Plan/Operands.h"
#include "fsdp/Support/Files.h"

#include <algorithm>
#include <cstdio>

namespace fsdp::plan {

namespace {

/// More than any memory has, and little enough to add to.
constexpr int64_t kMaxScratch = int64_t(1) << 60;

std::string specText(const TensorSpec &spec) {
  std::string text(dtypeName(spec.dtype));
  text += '[';
  for (size_t i = 0; i < spec.shape.size(); ++i)
    text += (i ? "," : "") + std::to_string(spec.shape[i]);
  return text + ']';
}

void appendTensors(const Plan &plan, const Arg &arg, std::string &text) {
  if (const auto *tensor = std::get_if<TensorArg>(&arg.value))
    text += ' ' + specText(plan.values[tensor->value]);
  else if (const auto *list = std::get_if<ArgList>(&arg.value))
    for (const Arg &element : *list)
      appendTensors(plan, element, text);
}

/// Writes the text of an instruction.
struct Signature {
  const Plan &plan;
  const Instruction &instruction;

  template <typename KindT> std::string unit(const KindT &kind) const {
    int64_t bytes = 0;
    for (int32_t param : plan.units[kind.unit].params)
      bytes += plan.params[param].computeSpec().numBytes();
    return std::string(kind.verb) + ' ' + std::to_string(bytes) + " bytes";
  }
  static std::string over(int64_t ranks) {
    return " over " + std::to_string(ranks) + " ranks";
  }
  std::string operands() const {
    return values(verbOf(instruction), getOperands(instruction));
  }
  std::string values(std::string_view name,
                     const std::vector<ValueId> &ids) const {
    int64_t bytes = 0;
    for (ValueId id : ids)
      bytes += plan.values[id].numBytes();
    return std::string(name) + ' ' + std::to_string(bytes) + " bytes";
  }

  std::string operator()(const Call &call) const {
    std::string text = call.op;
    if (!call.overload.empty())
      text += '.' + call.overload;
    for (const Arg &arg : call.args)
      appendTensors(plan, arg, text);
    text += " ->";
    for (ValueId out : call.outs)
      text += ' ' + (out < 0 ? "-" : specText(plan.values[out]));
    return text;
  }
  std::string operator()(const Fused &fused) const {
    std::string text = titleOf(plan, instruction);
    for (ValueId in : fused.ins)
      text += ' ' + specText(plan.values[in]);
    text += " ->";
    for (ValueId out : fused.outs)
      text += ' ' + specText(plan.values[out]);
    return text;
  }
  /// On CPU ranks the work of a reduction is done here.
  std::string operator()(const Wait &) const {
    std::string text = "wait";
    for (const Instruction &other : plan.instructions)
      if (other.records >= 0 &&
          std::find(instruction.waits.begin(), instruction.waits.end(),
                    other.records) != instruction.waits.end())
        text += " for " + signature(plan, other);
    return text;
  }
  std::string operator()(const AllGather &gather) const {
    return unit(gather) + over(gather.group ? gather.group : plan.shards());
  }
  std::string operator()(const Reshard &reshard) const {
    return unit(reshard) + (reshard.keep ? " keeping in groups of " +
                                               std::to_string(reshard.keep)
                                         : "");
  }
  std::string operator()(const ReduceScatter &) const {
    return operands() + over(plan.shards());
  }
  std::string operator()(const AllReduce &) const {
    return operands() + over(plan.replicas);
  }
  std::string operator()(const OffloadActivation &offload) const {
    return values(offload.verb, {offload.ins.front()});
  }
  /// What takes no operands and is of no unit binds values.
  template <typename KindT> std::string operator()(const KindT &kind) const {
    bool takes = false;
    forEachField<KindT>(
        [&](const auto &field) { takes |= field.role == Role::Operand; });
    if (takes)
      return operands();
    if constexpr (requires { kind.unit; })
      return unit(kind);
    else
      return "none";
  }
};

double seconds(const Cursor &cursor) {
  double value = cursor.real();
  if (!(value >= 0 && value <= 1e9))
    cursor.error("expected seconds of at least 0 and at most 1e9");
  return value;
}

std::string digits(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.6e", value);
  return text;
}

} // namespace

std::string signature(const Plan &plan, const Instruction &instruction) {
  return std::visit(Signature{plan, instruction}, instruction.kind);
}

Profile parseProfile(std::string_view json, const std::string &origin) {
  Json tree = parseJson(json, origin);
  Cursor root(tree, origin);
  root.keys({"format", "plan", "world_size", "steps", "outside_seconds",
             "instructions"},
            {"scratch_bytes"});
  if (int64_t format = root.at("format").integer(); format != kProfileFormat)
    root.at("format").error("expected " + std::to_string(kProfileFormat) +
                            ", got " + std::to_string(format));
  Profile profile;
  profile.planHash = root.at("plan").string();
  profile.worldSize = root.at("world_size").integer(1);
  profile.steps = root.at("steps").integer(1);
  profile.outsideSeconds = seconds(root.at("outside_seconds"));
  if (root.has("scratch_bytes"))
    profile.scratchBytes = root.at("scratch_bytes").integer(0, kMaxScratch);
  profile.instructions = root.at("instructions").list([](const Cursor &item) {
    item.keys({"what", "seconds"});
    return Profile::Entry{item.at("what").string(),
                          seconds(item.at("seconds"))};
  });
  return profile;
}

Profile readProfile(const std::string &path) {
  std::string text;
  if (std::string error = readFile(path, kMaxJsonBytes, text); !error.empty())
    throw PlanError(path + ": " + error);
  return parseProfile(text, path);
}

std::string printProfile(const Profile &profile) {
  std::string text =
      "{\n  \"format\": " + std::to_string(kProfileFormat) +
      ",\n  \"plan\": " + Json(profile.planHash).dump() +
      ",\n  \"world_size\": " + std::to_string(profile.worldSize) +
      ",\n  \"steps\": " + std::to_string(profile.steps) +
      ",\n  \"outside_seconds\": " + digits(profile.outsideSeconds);
  if (profile.scratchBytes)
    text += ",\n  \"scratch_bytes\": " + std::to_string(*profile.scratchBytes);
  text += ",\n  \"instructions\": [";
  const char *separator = "\n";
  for (const Profile::Entry &entry : profile.instructions) {
    text += separator;
    text += "    {\"what\": " + Json(entry.what).dump() +
            ", \"seconds\": " + digits(entry.seconds) + "}";
    separator = ",\n";
  }
  return text + "\n  ]\n}\n";
}

} // namespace fsdp::plan
