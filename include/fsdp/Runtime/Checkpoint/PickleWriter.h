//===- PickleWriter.h - pickles of protocol 2 -----------------------------===//
#ifndef FSDP_RUNTIME_CHECKPOINT_PICKLEWRITER_H
#define FSDP_RUNTIME_CHECKPOINT_PICKLEWRITER_H

#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>

namespace fsdp::runtime {

/// Appends objects to a pickle of protocol 2, which every Python reads;
/// repeated texts and globals are memoized. Each call appends one object, or
/// combines previous objects into one.
class PickleWriter {
public:
  PickleWriter();

  void none() { text += 'N'; }
  void boolean(bool value) { text += value ? '\x88' : '\x89'; }
  void integer(int64_t value);
  void real(double value);
  void string(std::string_view utf8);
  /// "module name".
  void global(std::string_view name);
  /// Begins what endTuple(), endItems() or endAppends() ends.
  void mark() { text += '('; }
  void endTuple() { text += 't'; }
  void dict() { text += '}'; }
  /// The objects since the mark are keys and values of the dict before it.
  void endItems() { text += 'u'; }
  void list() { text += ']'; }
  /// The objects since the mark are elements of the list before it.
  void endAppends() { text += 'e'; }
  /// Makes a call of the callee and the tuple before it.
  void call() { text += 'R'; }
  /// An object of a class without arguments, to which set() gives its state.
  void object(std::string_view name);
  void set() { text += 'b'; }
  void persistent() { text += 'Q'; }
  void extents(std::span<const int64_t> values);
  /// torch.Size.
  void size(std::span<const int64_t> values);
  /// What Pickle::value() reads; arrays become tuples or lists.
  void value(const nlohmann::json &value, bool tuples);

  /// The pickle, which must consist of one object.
  std::string finish() &&;

private:
  /// Appends what the key stands for, if that is memoized already; otherwise
  /// the caller appends it and memoizes it.
  bool recall(std::string key);
  void memoize();

  std::string text;
  std::unordered_map<std::string, size_t> memo;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CHECKPOINT_PICKLEWRITER_H
