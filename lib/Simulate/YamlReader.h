//===- YamlReader.h - YAML mappings with positions in errors --------------===//
#ifndef FSDP_LIB_SIMULATE_YAMLREADER_H
#define FSDP_LIB_SIMULATE_YAMLREADER_H

#include "fsdp/Simulate/DeviceModel.h"

#include "llvm/ADT/ArrayRef.h"
#include "llvm/ADT/StringRef.h"

#include <functional>
#include <vector>

namespace fsdp::simulate {

struct YamlEntry;

/// A node of a YAML file: a scalar or a mapping.
struct YamlNode {
  enum class Kind { Null, Scalar, Mapping } kind = Kind::Null;
  unsigned line = 1, column = 1;
  std::string scalar;
  std::vector<YamlEntry> entries;
};

struct YamlEntry {
  YamlNode key, value;
};

/// Turns nodes into values. Every method throws SimulateError with the file,
/// line and column of the node, the key, and what was expected and found.
class YamlReader {
public:
  explicit YamlReader(std::string path) : path(std::move(path)) {}

  YamlNode parse(llvm::StringRef text) const;

  [[noreturn]] void error(const YamlNode &node, const std::string &what) const;

  using Visit = std::function<void(llvm::StringRef key, const YamlNode &value)>;
  /// Calls `visit` for each entry of a mapping. A key that is none of `known`,
  /// or is there twice, is an error, as is one of `required` that is missing.
  void forEachEntry(const YamlNode &node, const std::string &where,
                    llvm::ArrayRef<llvm::StringRef> known,
                    llvm::ArrayRef<llvm::StringRef> required,
                    const Visit &visit) const;

  /// Wide enough for what any device has, and narrow enough to compute with.
  enum class Range { Seconds, Rate, Bytes, Fraction, Factor };
  double number(llvm::StringRef key, const YamlNode &node, Range range) const;
  /// From 1 on.
  int64_t count(llvm::StringRef key, const YamlNode &node) const;
  bool boolean(llvm::StringRef key, const YamlNode &node) const;
  std::string string(llvm::StringRef key, const YamlNode &node) const;

private:
  std::string path;
};

} // namespace fsdp::simulate

#endif // FSDP_LIB_SIMULATE_YAMLREADER_H
