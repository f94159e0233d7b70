//===- NameMap.cpp - names of tensors under other rules -------------------===//
#include "fsdp/Runtime/Checkpoint/NameMap.h"
#include "fsdp/Plan/ParseJson.h"
#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Support/Files.h"

#include <algorithm>
#include <utility>

namespace fsdp::runtime {

namespace {

constexpr std::string_view kNumber = "{}";
/// Of the file, and the numbers in a name.
constexpr uint64_t kMaxBytes = uint64_t(64) << 20;

size_t numbersIn(std::string_view pattern) {
  size_t count = 0;
  for (size_t at = pattern.find(kNumber); at != std::string_view::npos;
       at = pattern.find(kNumber, at + kNumber.size()))
    ++count;
  return count;
}

/// The numbers of a name that the pattern stands for.
std::optional<std::vector<std::string_view>> match(std::string_view pattern,
                                                   std::string_view name) {
  std::vector<std::string_view> numbers;
  while (true) {
    size_t length = std::min(pattern.find(kNumber), pattern.size());
    if (name.substr(0, length) != pattern.substr(0, length))
      return std::nullopt;
    name.remove_prefix(length);
    pattern.remove_prefix(length);
    if (pattern.empty())
      return name.empty() ? std::optional(numbers) : std::nullopt;
    pattern.remove_prefix(kNumber.size());
    size_t digits = std::min(name.find_first_not_of("0123456789"), name.size());
    if (digits == 0)
      return std::nullopt;
    numbers.push_back(name.substr(0, digits));
    name.remove_prefix(digits);
  }
}

std::string fill(std::string_view pattern,
                 const std::vector<std::string_view> &numbers) {
  std::string name;
  for (std::string_view number : numbers) {
    size_t at = pattern.find(kNumber);
    name += pattern.substr(0, at);
    name += number;
    pattern.remove_prefix(at + kNumber.size());
  }
  return name += pattern;
}

} // namespace

NameMap::NameMap(std::string file) : path(std::move(file)) {
  std::string text;
  if (std::string error = fsdp::readFile(path, kMaxBytes, text); !error.empty())
    throw InputError(path + ": " + error);
  nlohmann::json map;
  try {
    map = plan::parseJson(text, path);
  } catch (const plan::PlanError &error) {
    throw InputError(error.what());
  }
  if (!map.is_object())
    throw InputError(path + ": expected a json object from names to names");
  for (const auto &[ours, theirs] : map.items()) {
    if (!theirs.is_string())
      throw InputError(path + ": expected a name for \"" + ours + "\", got " +
                       theirs.dump());
    Rule rule{ours, theirs.get<std::string>()};
    if (numbersIn(rule.ours) != numbersIn(rule.theirs))
      throw InputError(path + ": expected as many {} in \"" + rule.theirs +
                       "\" as in \"" + rule.ours + "\"");
    rules.push_back(std::move(rule));
  }
}

std::vector<std::string> NameMap::translate(std::string_view name,
                                            std::string Rule::*from,
                                            std::string Rule::*to) const {
  std::vector<std::string> names;
  for (bool exact : {true, false}) {
    for (const Rule &rule : rules)
      if ((rule.*from == name) == exact)
        if (auto numbers = match(rule.*from, name))
          names.push_back(fill(rule.*to, *numbers));
    if (!names.empty())
      break;
  }
  if (names.empty())
    throw InputError(path + ": no name for tensor \"" + std::string(name) +
                     "\"");
  return names;
}

std::string NameMap::theirs(std::string_view ours) const {
  std::vector<std::string> names = translate(ours, &Rule::ours, &Rule::theirs);
  for (const std::string &name : names)
    if (name != names[0])
      throw InputError(path + ": two names for tensor \"" + std::string(ours) +
                       "\": \"" + names[0] + "\" and \"" + name + "\"");
  return names[0];
}

std::vector<std::string> NameMap::ours(std::string_view theirs) const {
  return translate(theirs, &Rule::theirs, &Rule::ours);
}

} // namespace fsdp::runtime
