//===- JsonCursor.h - strict reading of JSON, with paths in errors --------===//
#ifndef FSDP_LIB_PLAN_JSON_JSONCURSOR_H
#define FSDP_LIB_PLAN_JSON_JSONCURSOR_H

#include "fsdp/Plan/ParseJson.h"
#include "fsdp/Plan/Plan.h"

#include <initializer_list>
#include <limits>

namespace fsdp::plan {

/// A node of the tree with the way to it; the path is spelled out only for an
/// error message.
class Cursor {
public:
  Cursor(const Json &node, const std::string &origin)
      : node(node), origin(origin) {}

  [[noreturn]] void error(const std::string &message) const {
    std::string at = path();
    throw PlanError(origin + ": " + (at.empty() ? "" : at + ": ") + message);
  }

  /// A key of an object, which must be there or may be.
  struct Key {
    std::string_view name;
    bool isRequired = true;
  };
  /// Checks that this is an object with all required of `names`, and nothing
  /// beyond them.
  void keys(const std::vector<Key> &names) const {
    if (!node.is_object())
      expected("an object");
    size_t known = 0;
    for (const Key &key : names) {
      bool isThere = node.contains(key.name);
      if (!isThere && key.isRequired)
        error("missing key \"" + std::string(key.name) + "\"");
      known += isThere;
    }
    if (known == node.size())
      return;
    for (const auto &item : node.items())
      if (std::none_of(names.begin(), names.end(),
                       [&](const Key &key) { return item.key() == key.name; }))
        error("unknown key \"" + item.key() + "\"");
  }
  void keys(std::initializer_list<const char *> required,
            std::initializer_list<const char *> optional = {}) const {
    std::vector<Key> names;
    for (const char *name : required)
      names.push_back({name});
    for (const char *name : optional)
      names.push_back({name, /*isRequired=*/false});
    keys(names);
  }
  bool isObject() const { return node.is_object(); }
  bool has(const char *name) const { return node.contains(name); }
  Cursor at(const char *name) const {
    if (!node.is_object())
      expected("an object");
    auto it = node.find(name);
    if (it == node.end())
      error("missing key \"" + std::string(name) + "\"");
    return Cursor(*it, this, name, 0);
  }
  template <typename Fn> void each(Fn &&fn) const {
    if (!node.is_array())
      expected("an array");
    for (size_t i = 0; i < node.size(); ++i)
      fn(Cursor(node[i], this, nullptr, i));
  }
  template <typename Fn> auto list(Fn &&fn) const {
    std::vector<decltype(fn(*this))> result;
    if (node.is_array())
      result.reserve(node.size());
    each([&](const Cursor &item) { result.push_back(fn(item)); });
    return result;
  }

  /// Calls `fn(name, value)` for each member of an object.
  template <typename Fn> void members(Fn &&fn) const {
    if (!node.is_object())
      expected("an object");
    for (const auto &item : node.items())
      fn(item.key(), Cursor(item.value(), this, item.key().c_str(), 0));
  }

  int64_t integer(int64_t low = std::numeric_limits<int64_t>::min(),
                  int64_t high = std::numeric_limits<int64_t>::max()) const {
    if (!node.is_number_integer())
      expected("an integer");
    auto value = node.get<int64_t>();
    if (value < low || value > high)
      error("expected an integer in [" + std::to_string(low) + ", " +
            std::to_string(high) + "], got " + std::to_string(value));
    return value;
  }
  /// A table index, or -1 for "none".
  int32_t index() const {
    return int32_t(integer(-1, std::numeric_limits<int32_t>::max()));
  }
  std::vector<int32_t> indices() const {
    return list([](const Cursor &c) { return c.index(); });
  }
  bool boolean() const {
    if (!node.is_boolean())
      expected("a boolean");
    return node.get<bool>();
  }
  double real() const {
    if (node.is_object()) {
      keys({"f"});
      std::string name = at("f").string();
      if (name == "inf")
        return std::numeric_limits<double>::infinity();
      if (name == "-inf")
        return -std::numeric_limits<double>::infinity();
      if (name == "nan")
        return std::numeric_limits<double>::quiet_NaN();
      at("f").error("expected \"inf\", \"-inf\" or \"nan\", got \"" + name +
                    "\"");
    }
    if (!node.is_number_float())
      expected("a float");
    return node.get<double>();
  }
  const std::string &string() const {
    if (!node.is_string())
      expected("a string");
    return node.get_ref<const std::string &>();
  }
  const Json &json() const { return node; }

  [[noreturn]] void expected(const std::string &what) const {
    std::string got = node.is_number_integer() ? "an integer"
                      : node.is_number()       ? "a float"
                                               : node.type_name();
    error("expected " + what + ", got " + got);
  }

private:
  Cursor(const Json &node, const Cursor *parent, const char *name, size_t index)
      : node(node), origin(parent->origin), parent(parent), name(name),
        position(index) {}

  std::string path() const {
    if (!parent)
      return "";
    std::string prefix = parent->path();
    if (!name)
      return prefix + "[" + std::to_string(position) + "]";
    return prefix.empty() ? name : prefix + "." + name;
  }

  const Json &node;
  const std::string &origin;
  const Cursor *parent = nullptr;
  const char *name = nullptr;
  size_t position = 0;
};

} // namespace fsdp::plan

#endif // FSDP_LIB_PLAN_JSON_JSONCURSOR_H
