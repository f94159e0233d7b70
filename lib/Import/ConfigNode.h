//===- ConfigNode.h - a YAML config as nodes with positions ---------------===//
#ifndef FSDP_IMPORT_CONFIGNODE_H
#define FSDP_IMPORT_CONFIGNODE_H

#include "PolicySchema.h"

#include "mlir/IR/BuiltinAttributes.h"
#include "mlir/IR/Location.h"

namespace mlir::fsdp {

/// A parsed YAML node with its position. The methods that take a key or convert
/// a node to a value expect nodes that the schema has accepted.
struct ConfigNode {
  enum class Kind { Null, Scalar, Sequence, Mapping } kind = Kind::Null;
  Location loc;
  std::string scalar;
  std::vector<ConfigNode> elements;
  std::vector<std::pair<ConfigNode, ConfigNode>> entries; // key, value
  const PolicyKey *schema = nullptr;

  explicit ConfigNode(Location loc) : loc(loc) {}

  bool is(StringRef text) const {
    return kind == Kind::Scalar && scalar == text;
  }
  bool isNull() const { return kind == Kind::Null || is("null"); }
  /// The elements of a sequence, else the node itself.
  ArrayRef<ConfigNode> items() const;
  SmallVector<StringRef> getTexts() const;
  bool asBool() const { return is("true"); }
  int64_t asInteger() const { return *toInteger(scalar); }
  double asNumber() const { return *toNumber(scalar); }
  /// The scalar as the attribute of its type.
  Attribute toAttribute(MLIRContext *context) const;

  /// The value of a key; null where it is not given.
  const ConfigNode *find(StringRef key) const;
  /// The value of a key, or its default.
  StringRef getText(StringRef key) const;
  bool getBool(StringRef key) const { return getText(key) == "true"; }
  int64_t getInteger(StringRef key) const { return *toInteger(getText(key)); }
  double getNumber(StringRef key) const { return *toNumber(getText(key)); }
};

/// Reads the policy file at `path`, and checks it against the schema; reports
/// what is wrong with file, line and column. An empty file is an empty mapping.
FailureOr<ConfigNode> readConfig(MLIRContext *context, StringRef path);

} // namespace mlir::fsdp

#endif // FSDP_IMPORT_CONFIGNODE_H
