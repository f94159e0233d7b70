//===- Pickle.h - what a pickle describes, and executes nowhere -----------===//
//
// A pickle is a program that builds an object on a stack. This reader knows
// only the instructions that data needs, of protocols 2 to 5, and calls
// nothing: a class or function is represented by its name, which must be one
// that the caller expects, and a call by a record of its name and arguments.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_CHECKPOINT_PICKLE_H
#define FSDP_RUNTIME_CHECKPOINT_PICKLE_H

#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fsdp::runtime {

/// The objects of a pickle. Objects may be shared, and a hostile pickle may
/// have cycles, or describe far more than it has bytes. So code that follows
/// objects must limit its own depth, and accesses are counted: more accesses
/// than an honest pickle needs are an error.
///
/// All reading methods throw InputError: `place`, ": ", and what was expected
/// and what was found. `what` names the object in messages.
class Pickle {
public:
  using Object = uint32_t;

  /// Reads `bytes`, which are borrowed. `globals` are the classes and functions
  /// that may be named, each as "module name"; borrowed too.
  Pickle(std::string place, std::span<const std::byte> bytes,
         std::span<const std::string_view> globals);

  Object root() const { return rootObject; }
  /// The size of the pickle in bytes; what follows them is not part of it.
  size_t size() const { return end; }

  bool isNone(Object object) const;
  bool isInteger(Object object) const;
  bool boolean(Object object, std::string_view what) const;
  int64_t integer(Object object, std::string_view what) const;
  std::string_view text(Object object, std::string_view what) const;
  /// The name of a class or function.
  std::string_view global(Object object, std::string_view what) const;
  std::span<const Object> tuple(Object object, std::string_view what) const;
  std::span<const Object> list(Object object, std::string_view what) const;
  /// The elements of a tuple or a torch.Size: integers that are not negative.
  std::vector<int64_t> extents(Object object, std::string_view what) const;
  /// Keys and values.
  std::vector<std::pair<Object, Object>> dict(Object object,
                                              std::string_view what) const;
  /// The values of text keys, in the order of `keys`; all keys must be among
  /// `keys`.
  std::vector<std::optional<Object>>
  members(Object object, std::span<const std::string_view> keys,
          std::string_view what) const;
  bool isCall(Object object, std::string_view name) const;
  /// The arguments of a call of `name`.
  std::span<const Object> arguments(Object object, std::string_view name,
                                    std::string_view what) const;
  /// The state of an object that was made by a call of `name` without
  /// arguments.
  Object state(Object object, std::string_view name,
               std::string_view what) const;
  /// The persistent id of an object that lies outside the pickle.
  Object persistent(Object object, std::string_view what) const;
  /// None, bool, int, float, str, bytes, and lists, tuples and dicts of them; a
  /// tuple becomes an array too. Bytes need "_codecs encode" and
  /// "__builtin__ bytes" among the globals.
  nlohmann::json value(Object object, std::string_view what) const;

  [[noreturn]] void fail(std::string_view what,
                         const std::string &message) const;

private:
  friend class PickleMachine;

  enum class Kind : uint8_t {
    None,
    Bool,
    Int,
    Unsigned, ///< beyond int64_t
    Float,
    Text,
    Global,
    Tuple,
    List,
    Dict,       ///< items: key, value, key, ...
    Call,       ///< items: callee, arguments as a tuple, and the state if any
    Persistent, ///< items: what stands for it
  };
  struct Node {
    Kind kind = Kind::None;
    union {
      int64_t integer = 0;
      double number;
    };
    std::string_view text;
    std::vector<Object> items;
  };

  const Node &visit(Object object) const;
  const Node &expect(Object object, Kind kind, std::string_view what) const;
  nlohmann::json value(Object object, std::string_view what, int depth) const;
  static std::string_view nameOf(Kind kind);

  std::string place;
  std::vector<Node> nodes;
  Object rootObject = 0;
  size_t end = 0;
  mutable uint64_t visitsLeft = 0;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CHECKPOINT_PICKLE_H
