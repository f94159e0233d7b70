//===- TokenLayout.cpp - what a plan takes of a stream of tokens ----------===//
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Files/TokenSamples.h"

#include <algorithm>
#include <charconv>
#include <optional>

namespace fsdp::runtime {

namespace {

/// No model has longer sequences.
constexpr int64_t kMaxShift = 1 << 20;

struct Name {
  std::string input;
  int64_t shift;
};

Name parseName(const std::string &text, int64_t shift) {
  size_t plus = text.rfind('+');
  if (plus == std::string::npos)
    return {text, shift};
  const char *end = text.data() + text.size();
  auto read = std::from_chars(text.data() + plus + 1, end, shift);
  if (read.ptr != end || read.ec != std::errc() || text[plus + 1] == '-' ||
      shift > kMaxShift)
    throw InputError("--token-inputs: expected NAME or NAME+SHIFT, got \"" +
                     text + "\"");
  return {text.substr(0, plus), shift};
}

/// Of the embedding that takes the ids: the rows of its weight.
std::optional<int64_t> embeddingRows(const plan::Plan &plan,
                                     plan::ValueId ids) {
  for (const plan::Instruction &instruction : plan.instructions) {
    const auto *call = std::get_if<plan::Call>(&instruction.kind);
    if (!call || call->op != "aten::embedding" || call->args.size() < 2)
      continue;
    const auto *weight = std::get_if<plan::TensorArg>(&call->args[0].value);
    const auto *indices = std::get_if<plan::TensorArg>(&call->args[1].value);
    if (!weight || !indices)
      continue;
    plan::ValueId storage = plan.values[size_t(indices->value)].storage;
    if (indices->value != ids && storage != ids)
      continue;
    const plan::Value &rows = plan.values[size_t(weight->value)];
    if (!rows.shape.empty())
      return rows.shape[0];
  }
  return std::nullopt;
}

/// For two inputs that nobody named: avoids giving tokens to targets or
/// positions.
void checkOrder(const plan::Plan &plan, const std::vector<Name> &names) {
  std::vector<std::string> embedded;
  for (const plan::Input &input : plan.inputs)
    if (isTokenDType(input.spec.dtype) && embeddingRows(plan, input.value))
      embedded.push_back(input.name);
  if (names.size() < 2 || embedded.empty() ||
      (embedded.size() == 1 && embedded[0] == names[0].input))
    return;
  throw InputError(
      "--data: input \"" + embedded.back() +
      "\" goes into an embedding, but is not the first integer input of the "
      "plan: say which inputs get tokens and next tokens, as --token-inputs " +
      embedded[0] + "," +
      (embedded[0] == names[0].input ? names[1] : names[0]).input);
}

std::vector<Name> namesOf(const plan::Plan &plan,
                          const std::vector<std::string> &given) {
  std::vector<Name> names;
  for (const std::string &name : given)
    names.push_back(parseName(name, int64_t(names.size())));
  if (!names.empty())
    return names;
  for (const plan::Input &input : plan.inputs)
    if (isTokenDType(input.spec.dtype))
      names.push_back({input.name, int64_t(names.size())});
  if (names.empty() || names.size() > 2)
    throw InputError(
        "--data: token data is for one or two integer inputs, but the plan "
        "has " +
        std::to_string(names.size()) +
        (names.empty() ? "" : "; name them with --token-inputs"));
  checkOrder(plan, names);
  return names;
}

} // namespace

int64_t TokenLayout::span() const {
  int64_t shift = 0;
  for (const TokenInput &input : inputs)
    shift = std::max(shift, input.shift);
  return length + shift;
}

TokenLayout layOutTokens(const plan::Plan &plan,
                         const std::vector<std::string> &given) {
  TokenLayout layout;
  for (const Name &name : namesOf(plan, given)) {
    auto found = std::find_if(
        plan.inputs.begin(), plan.inputs.end(),
        [&](const plan::Input &input) { return input.name == name.input; });
    if (found == plan.inputs.end())
      throw InputError("--token-inputs: the plan has no input \"" + name.input +
                       "\"");
    const plan::TensorSpec &spec = found->spec;
    auto fail = [&](const std::string &expected) {
      throw InputError("input \"" + name.input + "\": token data needs " +
                       expected + ", got " + describe(spec));
    };
    if (!isTokenDType(spec.dtype))
      fail("an integer input");
    if (spec.shape.size() != 2 || spec.shape[0] == 0 || spec.shape[1] == 0)
      fail("samples and a sequence as its dimensions");
    if (layout.inputs.empty())
      layout.length = spec.shape[1];
    const plan::TensorSpec &first =
        plan.inputs[layout.inputs.empty() ? size_t(found - plan.inputs.begin())
                                          : layout.inputs[0].input]
            .spec;
    if (spec.shape != first.shape)
      fail("the shape of " + describe(first));
    for (const TokenInput &other : layout.inputs)
      if (plan.inputs[other.input].name == name.input)
        throw InputError("--token-inputs: \"" + name.input +
                         "\" appears twice");
    layout.inputs.push_back({size_t(found - plan.inputs.begin()), name.shift});
  }
  for (const plan::Input &input : plan.inputs)
    if (std::none_of(layout.inputs.begin(), layout.inputs.end(),
                     [&](const TokenInput &token) {
                       return plan.inputs[token.input].name == input.name;
                     }))
      throw InputError("input \"" + input.name +
                       "\": token data has nothing for it");
  for (const TokenInput &token : layout.inputs)
    if (auto rows = embeddingRows(plan, plan.inputs[token.input].value)) {
      layout.high = *rows;
      layout.bound = "the rows of the embedding of input \"" +
                     plan.inputs[token.input].name + "\"";
      return layout;
    }
  const plan::Input &first = plan.inputs[layout.inputs[0].input];
  layout.low = first.low;
  layout.high = first.high;
  layout.bound = "the range of input \"" + first.name +
                 "\" in the batch that was captured";
  return layout;
}

} // namespace fsdp::runtime
