//===- Pickle.cpp - what a pickle describes, and executes nowhere ---------===//
#include "fsdp/Runtime/Checkpoint/Pickle.h"
#include "PickleOps.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Support/Message.h"

#include <algorithm>
#include <bit>

namespace fsdp::runtime {

using Object = Pickle::Object;
using Op = PickleOp;

namespace {

/// The deepest value: of what is read as json.
constexpr int kMaxDepth = 64;
/// Large enough for anything that Python writes: `[0, 1, 2]` has 12 bytes and 4
/// objects, and an object that is mentioned again has 2 bytes or more.
uint64_t visitsOf(size_t bytes) { return 64 * uint64_t(bytes) + 1024; }

/// Objects take far more memory than the instructions that make them. An honest
/// pickle with many objects has more than 4 bytes of instructions per object.
uint64_t mostObjects(size_t bytes) { return bytes / 4 + (1 << 20); }

} // namespace

/// Runs the program.
class PickleMachine {
public:
  PickleMachine(Pickle &pickle, std::span<const std::byte> bytes,
                std::span<const std::string_view> globals)
      : pickle(pickle), bytes(bytes), globals(globals) {}

  void run() {
    if (Op(number<1>()) != Op::Proto)
      fail("expected a pickle, which begins with its protocol");
    if (auto protocol = number<1>(); protocol < 2 || protocol > 5)
      fail("expected protocol 2 to 5, got " + std::to_string(protocol));
    while (!stopped)
      step(Op(number<1>()));
    pickle.end = at;
  }

private:
  using Kind = Pickle::Kind;
  using Node = Pickle::Node;

  [[noreturn]] void fail(const std::string &message) {
    pickle.fail("byte " + std::to_string(at), message);
  }

  std::string_view take(uint64_t size) {
    if (size > bytes.size() - at)
      fail("expected " + std::to_string(size) + " more bytes, got " +
           std::to_string(bytes.size() - at));
    std::string_view part(reinterpret_cast<const char *>(bytes.data()) + at,
                          size);
    at += size;
    return part;
  }

  /// Little-endian.
  template <size_t width> uint64_t number() {
    uint64_t value = 0;
    std::string_view part = take(width);
    for (size_t i = width; i-- > 0;)
      value = value << 8 | uint8_t(part[i]);
    return value;
  }

  std::string_view line() {
    std::string_view rest(reinterpret_cast<const char *>(bytes.data()) + at,
                          bytes.size() - at);
    size_t length = rest.find('\n');
    if (length == std::string_view::npos)
      fail("expected a terminated name");
    at += length + 1;
    return rest.substr(0, length);
  }

  void push(Node node) {
    if (pickle.nodes.size() >= mostObjects(bytes.size()))
      fail("it has implausibly many objects");
    stack.push_back(Object(pickle.nodes.size()));
    pickle.nodes.push_back(std::move(node));
  }
  void pushInteger(int64_t value) {
    Node node{Kind::Int, {}, {}, {}};
    node.integer = value;
    push(std::move(node));
  }
  void pushList(Kind kind, std::vector<Object> items) {
    push({kind, {}, {}, std::move(items)});
  }

  size_t floor() const { return marks.empty() ? 0 : marks.back(); }

  /// The last `count` of the stack since the last mark.
  std::vector<Object> pop(size_t count) {
    if (stack.size() - floor() < count)
      fail("expected " + std::to_string(count) + " objects, got " +
           std::to_string(stack.size() - floor()));
    std::vector<Object> items(stack.end() - ptrdiff_t(count), stack.end());
    stack.resize(stack.size() - count);
    return items;
  }
  std::vector<Object> popMark() {
    if (marks.empty())
      fail("expected a mark");
    std::vector<Object> items = pop(stack.size() - floor());
    marks.pop_back();
    return items;
  }

  Node &top(Kind kind) {
    if (stack.size() <= floor())
      fail("expected an object");
    Node &node = pickle.nodes[stack.back()];
    if (node.kind != kind)
      fail("expected a " + std::string(Pickle::nameOf(kind)) + ", got a " +
           std::string(Pickle::nameOf(node.kind)));
    return node;
  }

  void extend(Kind kind, const std::vector<Object> &items) {
    if (kind == Kind::Dict && items.size() % 2)
      fail("expected keys and values in turn");
    std::vector<Object> &to = top(kind).items;
    to.insert(to.end(), items.begin(), items.end());
  }

  void memoize(uint64_t index) {
    // As Python's own pickler numbers them.
    if (index != memo.size())
      fail("expected memo " + std::to_string(memo.size()) + ", got " +
           std::to_string(index));
    if (stack.size() <= floor())
      fail("expected an object");
    memo.push_back(stack.back());
  }
  void recall(uint64_t index) {
    if (index >= memo.size())
      fail("expected one of " + std::to_string(memo.size()) +
           " memos, got memo " + std::to_string(index));
    stack.push_back(memo[index]);
  }

  void pushText(std::string_view text) {
    if (!isUtf8(text))
      fail("expected a text in UTF-8");
    push({Kind::Text, {}, text, {}});
  }

  void pushGlobal(std::string_view module, std::string_view name) {
    std::string whole = std::string(module) + " " + std::string(name);
    auto known = std::find(globals.begin(), globals.end(), whole);
    if (known == globals.end())
      fail("a class or function that is not expected here: \"" + whole + "\"");
    push({Kind::Global, {}, *known, {}});
  }

  void pushLong() {
    std::string_view digits = take(number<1>());
    // Two's complement, of up to 64 bits and a sign.
    uint64_t value = 0;
    bool negative = !digits.empty() && uint8_t(digits.back()) >= 0x80;
    bool beyond = digits.size() == 9 && digits.back() == 0;
    if (digits.size() > 8 && !beyond)
      fail("expected an integer of 64 bits");
    for (size_t i = std::min<size_t>(digits.size(), 8); i-- > 0;)
      value = value << 8 | uint8_t(digits[i]);
    if (negative && digits.size() < 8)
      value |= ~uint64_t(0) << (8 * digits.size());
    pushInteger(int64_t(value));
    if (beyond && int64_t(value) < 0)
      pickle.nodes.back().kind = Kind::Unsigned;
  }

  void pushCall() {
    std::vector<Object> parts = pop(2);
    if (pickle.nodes[parts[0]].kind != Kind::Global ||
        pickle.nodes[parts[1]].kind != Kind::Tuple)
      fail("expected a call of a class or function with a tuple");
    pushList(Kind::Call, std::move(parts));
  }

  void step(Op op) {
    switch (op) {
    case Op::Frame:
      if (auto size = number<8>(); size > bytes.size() - at)
        fail("expected a frame of " + std::to_string(size) + " bytes, got " +
             std::to_string(bytes.size() - at));
      return;
    case Op::Stop:
      if (stack.size() != 1 || !marks.empty())
        fail("expected one object at the end, got " +
             std::to_string(stack.size()));
      pickle.rootObject = stack.back();
      stopped = true;
      return;
    case Op::Mark:
      marks.push_back(stack.size());
      return;
    case Op::None:
      return push({});
    case Op::NewTrue:
    case Op::NewFalse:
      pushInteger(op == Op::NewTrue);
      pickle.nodes.back().kind = Kind::Bool;
      return;
    case Op::BinInt:
      return pushInteger(int32_t(number<4>()));
    case Op::BinInt1:
      return pushInteger(int64_t(number<1>()));
    case Op::BinInt2:
      return pushInteger(int64_t(number<2>()));
    case Op::Long1:
      return pushLong();
    case Op::BinFloat: {
      uint64_t bits = 0;
      for (char byte : take(8))
        bits = bits << 8 | uint8_t(byte);
      Node node{Kind::Float, {}, {}, {}};
      node.number = std::bit_cast<double>(bits);
      return push(std::move(node));
    }
    case Op::BinUnicode:
      return pushText(take(number<4>()));
    case Op::ShortBinUnicode:
      return pushText(take(number<1>()));
    case Op::EmptyTuple:
      return pushList(Kind::Tuple, {});
    case Op::Tuple:
      return pushList(Kind::Tuple, popMark());
    case Op::Tuple1:
    case Op::Tuple2:
    case Op::Tuple3:
      return pushList(Kind::Tuple, pop(size_t(op) - size_t(Op::Tuple1) + 1));
    case Op::EmptyList:
      return pushList(Kind::List, {});
    case Op::Append:
      return extend(Kind::List, pop(1));
    case Op::Appends:
      return extend(Kind::List, popMark());
    case Op::EmptyDict:
      return pushList(Kind::Dict, {});
    case Op::SetItem:
      return extend(Kind::Dict, pop(2));
    case Op::SetItems:
      return extend(Kind::Dict, popMark());
    case Op::Global: {
      std::string_view module = line();
      return pushGlobal(module, line());
    }
    case Op::StackGlobal: {
      std::vector<Object> parts = pop(2);
      const Node &module = pickle.nodes[parts[0]],
                 &name = pickle.nodes[parts[1]];
      if (module.kind != Kind::Text || name.kind != Kind::Text)
        fail("expected a module and a name");
      return pushGlobal(module.text, name.text);
    }
    case Op::Reduce:
    case Op::NewObj:
      return pushCall();
    case Op::Build: {
      std::vector<Object> state = pop(1);
      std::vector<Object> &parts = top(Kind::Call).items;
      if (parts.size() != 2)
        fail("an object is set twice");
      parts.push_back(state[0]);
      return;
    }
    case Op::BinPersId:
      return pushList(Kind::Persistent, pop(1));
    case Op::BinPut:
      return memoize(number<1>());
    case Op::LongBinPut:
      return memoize(number<4>());
    case Op::Memoize:
      return memoize(memo.size());
    case Op::BinGet:
      return recall(number<1>());
    case Op::LongBinGet:
      return recall(number<4>());
    case Op::Proto:
      break;
    }
    --at;
    fail("an instruction that data does not need: " +
         std::to_string(unsigned(op)));
  }

  Pickle &pickle;
  std::span<const std::byte> bytes;
  std::span<const std::string_view> globals;
  size_t at = 0;
  bool stopped = false;
  std::vector<Object> stack, memo;
  std::vector<size_t> marks; ///< heights of the stack
};

Pickle::Pickle(std::string place, std::span<const std::byte> bytes,
               std::span<const std::string_view> globals)
    : place(std::move(place)), visitsLeft(visitsOf(bytes.size())) {
  // Objects are numbered by 32 bits.
  if (bytes.size() > UINT32_MAX)
    fail("a pickle", "expected less than 4 GiB, got " +
                         std::to_string(bytes.size()) + " bytes");
  PickleMachine(*this, bytes, globals).run();
}

void Pickle::fail(std::string_view what, const std::string &message) const {
  throw InputError(place + ": " + std::string(what) + ": " + message);
}

std::string_view Pickle::nameOf(Kind kind) {
  switch (kind) {
  case Kind::None:
    return "None";
  case Kind::Bool:
    return "bool";
  case Kind::Int:
  case Kind::Unsigned:
    return "int";
  case Kind::Float:
    return "float";
  case Kind::Text:
    return "str";
  case Kind::Global:
    return "class or function";
  case Kind::Tuple:
    return "tuple";
  case Kind::List:
    return "list";
  case Kind::Dict:
    return "dict";
  case Kind::Call:
    return "call";
  case Kind::Persistent:
    return "persistent id";
  }
  return "";
}

const Pickle::Node &Pickle::visit(Object object) const {
  if (visitsLeft == 0)
    throw InputError(place + ": it describes far more data than it has bytes");
  --visitsLeft;
  return nodes[object];
}

const Pickle::Node &Pickle::expect(Object object, Kind kind,
                                   std::string_view what) const {
  const Node &node = visit(object);
  if (node.kind != kind)
    fail(what, "expected a " + std::string(nameOf(kind)) + ", got a " +
                   std::string(nameOf(node.kind)));
  // Using its items means looking at each of them.
  visitsLeft -= std::min<uint64_t>(visitsLeft, node.items.size());
  return node;
}

bool Pickle::isNone(Object object) const {
  return visit(object).kind == Kind::None;
}

bool Pickle::isInteger(Object object) const {
  return visit(object).kind == Kind::Int;
}

bool Pickle::boolean(Object object, std::string_view what) const {
  return expect(object, Kind::Bool, what).integer != 0;
}

int64_t Pickle::integer(Object object, std::string_view what) const {
  return expect(object, Kind::Int, what).integer;
}

std::string_view Pickle::text(Object object, std::string_view what) const {
  return expect(object, Kind::Text, what).text;
}

std::string_view Pickle::global(Object object, std::string_view what) const {
  return expect(object, Kind::Global, what).text;
}

std::span<const Object> Pickle::tuple(Object object,
                                      std::string_view what) const {
  return expect(object, Kind::Tuple, what).items;
}

std::span<const Object> Pickle::list(Object object,
                                     std::string_view what) const {
  return expect(object, Kind::List, what).items;
}

std::vector<int64_t> Pickle::extents(Object object,
                                     std::string_view what) const {
  if (isCall(object, "torch Size")) {
    auto arguments = this->arguments(object, "torch Size", what);
    if (arguments.size() != 1)
      fail(what, "expected a torch.Size of one tuple");
    object = arguments[0];
  }
  std::vector<int64_t> values;
  for (Object item : tuple(object, what)) {
    values.push_back(integer(item, what));
    if (values.back() < 0)
      fail(what, "expected sizes, got " + std::to_string(values.back()));
  }
  return values;
}

std::vector<std::pair<Object, Object>>
Pickle::dict(Object object, std::string_view what) const {
  const std::vector<Object> &items = expect(object, Kind::Dict, what).items;
  std::vector<std::pair<Object, Object>> pairs;
  for (size_t i = 0; i < items.size(); i += 2)
    pairs.emplace_back(items[i], items[i + 1]);
  return pairs;
}

std::vector<std::optional<Object>>
Pickle::members(Object object, std::span<const std::string_view> keys,
                std::string_view what) const {
  std::vector<std::optional<Object>> found(keys.size());
  for (auto [key, value] : dict(object, what)) {
    std::string_view name = text(key, what);
    auto at = std::find(keys.begin(), keys.end(), name);
    if (at == keys.end())
      fail(what, "an unknown member: \"" + std::string(name) + "\"");
    std::optional<Object> &member = found[size_t(at - keys.begin())];
    if (member)
      fail(what, "\"" + std::string(name) + "\" appears twice");
    member = value;
  }
  return found;
}

bool Pickle::isCall(Object object, std::string_view name) const {
  const Node &node = visit(object);
  return node.kind == Kind::Call && nodes[node.items[0]].text == name;
}

std::span<const Object> Pickle::arguments(Object object, std::string_view name,
                                          std::string_view what) const {
  const Node &node = expect(object, Kind::Call, what);
  if (std::string_view got = nodes[node.items[0]].text; got != name)
    fail(what, "expected " + std::string(name) + ", got " + std::string(got));
  if (node.items.size() > 2)
    fail(what, "expected no state of its own");
  return tuple(node.items[1], what);
}

Object Pickle::state(Object object, std::string_view name,
                     std::string_view what) const {
  const Node &node = expect(object, Kind::Call, what);
  if (std::string_view got = nodes[node.items[0]].text; got != name)
    fail(what, "expected " + std::string(name) + ", got " + std::string(got));
  if (node.items.size() != 3 || !tuple(node.items[1], what).empty())
    fail(what, "expected a state, and no arguments");
  return node.items[2];
}

Object Pickle::persistent(Object object, std::string_view what) const {
  return expect(object, Kind::Persistent, what).items[0];
}

nlohmann::json Pickle::value(Object object, std::string_view what) const {
  return value(object, what, 0);
}

nlohmann::json Pickle::value(Object object, std::string_view what,
                             int depth) const {
  if (depth > kMaxDepth)
    fail(what, "expected a value of at most " + std::to_string(kMaxDepth) +
                   " levels");
  const Node &node = visit(object);
  switch (node.kind) {
  case Kind::None:
    return nullptr;
  case Kind::Bool:
    return node.integer != 0;
  case Kind::Int:
    return node.integer;
  case Kind::Unsigned:
    return uint64_t(node.integer);
  case Kind::Float:
    return node.number;
  case Kind::Text:
    return std::string(node.text);
  case Kind::Tuple:
  case Kind::List: {
    nlohmann::json array = nlohmann::json::array();
    for (Object item : node.items)
      array.push_back(value(item, what, depth + 1));
    return array;
  }
  case Kind::Dict: {
    nlohmann::json members = nlohmann::json::object();
    for (auto [key, item] : dict(object, what)) {
      std::string name(text(key, what));
      if (!members.emplace(name, value(item, what, depth + 1)).second)
        fail(what, "\"" + name + "\" appears twice");
    }
    return members;
  }
  case Kind::Call: {
    if (isCall(object, kBytes)) {
      if (!arguments(object, kBytes, what).empty())
        fail(what, "expected no bytes");
      return nlohmann::json::binary({});
    }
    // Characters up to 255, and the name of that code.
    auto parts = arguments(object, kEncode, what);
    if (parts.size() != 2 || text(parts[1], what) != "latin1")
      fail(what, "expected bytes in latin1");
    std::string_view utf8 = text(parts[0], what);
    nlohmann::json::binary_t bytes;
    for (size_t i = 0; i < utf8.size(); ++i) {
      unsigned char byte = utf8[i];
      if (byte >= 0x80) {
        if (byte > 0xc3)
          fail(what, "expected characters below 256");
        byte = (byte & 3) << 6 | (utf8[++i] & 0x3f);
      }
      bytes.push_back(byte);
    }
    return bytes;
  }
  case Kind::Global:
  case Kind::Persistent:
    break;
  }
  fail(what, "expected None, a bool, int, float, str, bytes, list, tuple or "
             "dict, got a " +
                 std::string(nameOf(node.kind)));
}

} // namespace fsdp::runtime
