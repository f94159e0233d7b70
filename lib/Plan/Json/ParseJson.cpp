//===- ParseJson.cpp - JSON text to a tree, bounded -----------------------===//
#include "fsdp/Plan/ParseJson.h"
#include "fsdp/Plan/Plan.h"

#include <limits>

namespace fsdp::plan {

namespace {

constexpr size_t kMaxDepth = 64;

/// Builds the tree while it limits depth and refuses duplicate keys and
/// out-of-range integers.
class TreeBuilder : public nlohmann::json_sax<Json> {
public:
  Json root;
  std::string error;

  bool null() override { return add(Json()); }
  bool boolean(bool value) override { return add(Json(value)); }
  bool number_integer(int64_t value) override { return add(Json(value)); }
  bool number_unsigned(uint64_t value) override {
    if (value > uint64_t(std::numeric_limits<int64_t>::max()))
      return fail("expected a 64-bit integer, got " + std::to_string(value));
    return add(Json(int64_t(value)));
  }
  bool number_float(double value, const std::string &text) override {
    // An integer too large for 64 bits arrives here as a float.
    if (text.find_first_of(".eE") == std::string::npos)
      return fail("expected a 64-bit integer, got " + text);
    return add(Json(value));
  }
  bool string(std::string &value) override {
    return add(Json(std::move(value)));
  }
  bool binary(Json::binary_t &) override { return fail("unexpected binary"); }
  bool start_object(size_t) override { return open(Json::object()); }
  bool start_array(size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(std::string &name) override {
    if (stack.back()->contains(name))
      return fail("duplicate key \"" + name + "\"");
    slot = &(*stack.back())[name];
    return true;
  }
  bool parse_error(size_t position, const std::string &,
                   const nlohmann::detail::exception &) override {
    return fail("not valid json at byte " + std::to_string(position));
  }

private:
  bool fail(std::string message) {
    error = std::move(message);
    return false;
  }
  Json *place(Json value) {
    if (stack.empty()) {
      root = std::move(value);
      return &root;
    }
    Json &top = *stack.back();
    if (top.is_array()) {
      top.push_back(std::move(value));
      return &top.back();
    }
    *slot = std::move(value);
    return slot;
  }
  bool add(Json value) {
    place(std::move(value));
    return true;
  }
  bool open(Json value) {
    if (stack.size() >= kMaxDepth)
      return fail("nested deeper than " + std::to_string(kMaxDepth));
    // Pointers into the parent stay valid: it gets no further element before
    // this container is closed.
    stack.push_back(place(std::move(value)));
    return true;
  }
  bool close() {
    stack.pop_back();
    return true;
  }

  std::vector<Json *> stack;
  Json *slot = nullptr;
};

} // namespace

Json parseJson(std::string_view text, const std::string &origin) {
  TreeBuilder tree;
  if (!Json::sax_parse(text.begin(), text.end(), &tree))
    throw PlanError(origin + ": " + tree.error);
  return std::move(tree.root);
}

} // namespace fsdp::plan
