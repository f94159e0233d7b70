//===- PolicySchema.cpp - what the policy file may say --------------------===//
#include "PolicySchema.h"

#include "llvm/ADT/STLExtras.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/ADT/StringSwitch.h"
#include "llvm/Support/FormatVariadic.h"
#include "llvm/Support/JSON.h"

#include <cmath>

using namespace llvm;
namespace json = llvm::json;

namespace mlir::fsdp {

/// The text of policy_schema.json, made by CMake.
StringRef getPolicySchemaText();

//===----------------------------------------------------------------------===//
// The texts of scalars
//===----------------------------------------------------------------------===//

std::optional<int64_t> toInteger(StringRef text) {
  int64_t value;
  return text.getAsInteger(10, value) ? std::nullopt : std::optional(value);
}

std::optional<double> toNumber(StringRef text) {
  double value;
  // PyYAML writes infinity with a dot.
  if ((text == ".inf" ? "inf" : text).getAsDouble(value))
    return std::nullopt;
  return value;
}

std::optional<int64_t> toBytes(StringRef text) {
  StringRef digits =
      text.take_while([](char c) { return isDigit(c) || c == '.'; });
  double unit = StringSwitch<double>(text.drop_front(digits.size()).trim())
                    .Case("", 1)
                    .Case("GiB", 1LL << 30)
                    .Case("MiB", 1LL << 20)
                    .Case("KiB", 1LL << 10)
                    .Case("GB", 1e9)
                    .Case("MB", 1e6)
                    .Case("KB", 1e3)
                    .Default(0);
  double number;
  if (digits.getAsDouble(number) || !(number * unit >= 0.5) ||
      number * unit > 1e18)
    return std::nullopt;
  return std::llround(number * unit);
}

//===----------------------------------------------------------------------===//
// Values
//===----------------------------------------------------------------------===//

static bool isInBounds(const PolicyKey &key, double value) {
  return std::isfinite(value) && !(key.least && value < *key.least) &&
         !(key.above && value <= *key.above) &&
         !(key.most && value > *key.most) &&
         !(key.below && value >= *key.below);
}

static bool isOfType(const PolicyKey &key, StringRef type, StringRef text) {
  if (type == "bool")
    return text == "true" || text == "false";
  if (type == "false" || type == "null")
    return text == type;
  if (type == "integer" && !toInteger(text))
    return false;
  if (type == "integer" || type == "number") {
    std::optional<double> value = toNumber(text);
    return value && isInBounds(key, *value);
  }
  if (type == "bytes")
    return toBytes(text).has_value();
  return is_contained({"pattern", "operator", "path", "name"}, type) &&
         !text.empty();
}

bool PolicyKey::accepts(StringRef text) const {
  auto isText = [&](StringRef value) {
    // A norm of 2.0 is one of 2.
    return text == value || (types.empty() && toNumber(value) &&
                             toNumber(text) == toNumber(value));
  };
  return any_of(values, isText) || any_of(types, [&](StringRef type) {
           return isOfType(*this, type, text);
         });
}

static std::string describeBounds(const PolicyKey &key) {
  std::pair<StringRef, std::optional<double>> bounds[] = {
      {"of at least", key.least},
      {"above", key.above},
      {"at most", key.most},
      {"below", key.below}};
  std::string text;
  for (auto [words, bound] : bounds)
    if (bound)
      text += formatv("{0}{1} {2}", text.empty() ? " " : " and ", words,
                      json::Value(*bound));
  return text;
}

static std::string describeType(const PolicyKey &key, StringRef type) {
  if (type.consume_front("list of "))
    return "a sequence of " + (key.length ? itostr(*key.length) + " " : "") +
           type.str() + "s" + describeBounds(key);
  if (type == "integer" || type == "number")
    return (type == "integer" ? "an integer" : "a number") +
           describeBounds(key);
  return StringSwitch<StringRef>(type)
      .Case("false", "false")
      .Case("bytes", "a positive number of bytes such as 40GB or 37.5GiB")
      .Case("operator", "an operator")
      .StartsWith("mapping", "a mapping")
      .Case("pattern", "a pattern")
      .Case("path", "a path")
      .Default("a name")
      .str();
}

std::string PolicyKey::describe() const {
  SmallVector<std::string> alternatives;
  for (StringRef type : types)
    if (type == "bool")
      alternatives.append({"true", "false"});
    else if (type != "null")
      alternatives.push_back(describeType(*this, type));
  append_range(alternatives, values);
  if (is_contained(types, "null"))
    alternatives.push_back("null");
  std::string last = alternatives.pop_back_val();
  if (alternatives.empty())
    return last;
  return join(alternatives, ", ") + " or " + last;
}

//===----------------------------------------------------------------------===//
// The file
//===----------------------------------------------------------------------===//

static std::vector<std::string> getTexts(const json::Object &object,
                                         StringRef name) {
  std::vector<std::string> texts;
  if (const json::Array *array = object.getArray(name))
    for (const json::Value &value : *array)
      texts.push_back(value.getAsString()->str());
  return texts;
}

/// `around`: the keys of the mapping that this one stands in, if any.
static PolicyKey readKey(const json::Object &object,
                         const json::Array *around) {
  PolicyKey key;
  auto text = [&](StringRef name) {
    return object.getString(name).value_or("").str();
  };
  auto number = [&](StringRef name) { return object.getNumber(name); };
  key.name = text("key");
  key.types = getTexts(object, "types");
  key.values = getTexts(object, "values");
  key.least = number("least");
  key.above = number("above");
  key.most = number("most");
  key.below = number("below");
  key.length = object.getInteger("length");
  key.required = object.getBoolean("required").value_or(false);
  key.needs = text("needs");
  key.standsFor = text("stands_for");
  key.oneOf = getTexts(object, "one_of");
  if (const json::Value *value = object.get("default");
      value && !value->getAsObject() && !value->getAsArray())
    key.initial = value->getAsString() ? value->getAsString()->str()
                                       : formatv("{0}", *value).str();
  if (const json::Array *keys = object.getArray("keys"))
    for (const json::Value &value : *keys)
      key.keys.push_back(readKey(*value.getAsObject(), keys));
  for (StringRef shared : getTexts(object, "shared"))
    for (const json::Value &value : *around)
      if (value.getAsObject()->getString("key") == shared) {
        key.keys.push_back(readKey(*value.getAsObject(), around));
        key.keys.back().initial.reset(); // that of the mapping around holds
      }
  for (StringRef type : key.types)
    if (type.consume_front("list of ") || type.consume_front("mapping of ")) {
      PolicyKey element = key;
      element.types = {type.str()};
      element.values.clear();
      element.length.reset();
      key.element = {std::move(element)};
    }
  return key;
}

const PolicyKey *PolicyKey::find(StringRef key) const {
  auto it =
      find_if(keys, [&](const PolicyKey &each) { return each.name == key; });
  return it == keys.end() ? nullptr : &*it;
}

const PolicyKey &getPolicySchema() {
  static const PolicyKey schema = [] {
    json::Value value = cantFail(json::parse(getPolicySchemaText()));
    PolicyKey root = readKey(*value.getAsObject(), nullptr);
    root.types = {"mapping"};
    return root;
  }();
  return schema;
}

} // namespace mlir::fsdp
