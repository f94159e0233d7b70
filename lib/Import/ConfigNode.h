//===- ConfigNode.h - a YAML config as nodes with positions ---------------===//
#ifndef FSDP_IMPORT_CONFIGNODE_H
#define FSDP_IMPORT_CONFIGNODE_H

#include "fsdp/Support/Nearest.h"
#include "fsdp/Support/YamlText.h"
#include "mlir/IR/BuiltinOps.h"
#include "mlir/IR/Diagnostics.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/ADT/StringSet.h"
#include "llvm/ADT/StringSwitch.h"
#include "llvm/Support/SourceMgr.h"
#include "llvm/Support/YAMLParser.h"

#include <cmath>

namespace mlir::fsdp {
namespace yaml = llvm::yaml;

/// A parsed YAML node with its position.
struct ConfigNode {
  enum class Kind { Null, Scalar, Sequence, Mapping } kind = Kind::Null;
  Location loc;
  std::string scalar;
  std::vector<ConfigNode> elements;
  std::vector<std::pair<ConfigNode, ConfigNode>> entries; // key, value

  explicit ConfigNode(Location loc) : loc(loc) {}
};

/// Reads YAML text into nodes, and nodes into values; complaints carry file,
/// line and column. Base of the readers of the config's parts.
class ConfigNodeReader {
public:
  using Node = ConfigNode;

  ConfigNodeReader(ModuleOp module, StringRef path)
      : module(module), path(path) {}

protected:
  //===--------------------------------------------------------------------===//
  // Text to nodes
  //===--------------------------------------------------------------------===//

  Location getLoc(unsigned line, unsigned column) {
    return FileLineColLoc::get(module.getContext(), path, line, column);
  }

  FailureOr<Node> parse(llvm::MemoryBufferRef buffer) {
    if (auto defect = ::fsdp::findDefect(buffer.getBuffer()))
      return emitError(getLoc(defect->line, defect->column)) << defect->what;
    llvm::SourceMgr sources;
    sources.setDiagHandler(
        [](const llvm::SMDiagnostic &diag, void *self) {
          auto *reader = static_cast<ConfigNodeReader *>(self);
          if (!std::exchange(reader->syntaxError, true))
            emitError(reader->getLoc(diag.getLineNo(), diag.getColumnNo() + 1))
                << diag.getMessage();
        },
        this);
    yaml::Stream stream(buffer, sources, /*ShowColors=*/false);
    Node root(getLoc(1, 1));
    if (auto document = stream.begin(); document != stream.end())
      if (yaml::Node *node = document->getRoot())
        if (failed(convert(sources, node, root)))
          return failure();
    if (stream.failed() || syntaxError)
      return failure();
    return root;
  }

  LogicalResult convert(llvm::SourceMgr &sources, yaml::Node *node,
                        Node &result, unsigned depth = 0) {
    if (syntaxError)
      return failure(); // the node may have no place in the file
    auto [line, column] =
        sources.getLineAndColumn(node->getSourceRange().Start);
    result.loc = getLoc(line, column);
    if (isa<yaml::NullNode>(node))
      return success();
    if (auto *scalar = dyn_cast<yaml::ScalarNode>(node)) {
      SmallString<32> storage;
      result.kind = Node::Kind::Scalar;
      result.scalar = scalar->getValue(storage).str();
      return success();
    }
    if (depth == ::fsdp::kMaxYamlDepth)
      return emitError(result.loc)
             << "nested deeper than " << ::fsdp::kMaxYamlDepth;
    if (auto *sequence = dyn_cast<yaml::SequenceNode>(node)) {
      result.kind = Node::Kind::Sequence;
      for (yaml::Node &element : *sequence) {
        result.elements.emplace_back(result.loc);
        if (failed(
                convert(sources, &element, result.elements.back(), depth + 1)))
          return failure();
      }
      return success(!syntaxError);
    }
    if (auto *mapping = dyn_cast<yaml::MappingNode>(node)) {
      result.kind = Node::Kind::Mapping;
      for (yaml::KeyValueNode &entry : *mapping) {
        Node key(result.loc), value(result.loc);
        yaml::Node *keyNode = entry.getKey();
        if (!keyNode || failed(convert(sources, keyNode, key, depth + 1)))
          return failure();
        yaml::Node *valueNode = entry.getValue();
        if (!valueNode || failed(convert(sources, valueNode, value, depth + 1)))
          return failure();
        result.entries.emplace_back(std::move(key), std::move(value));
      }
      return success(!syntaxError);
    }
    return emitError(result.loc)
           << "anchors and block scalars have no meaning here";
  }

  //===--------------------------------------------------------------------===//
  // Nodes to values
  //===--------------------------------------------------------------------===//

  /// Calls `visit(key, value)` for each entry; keys are checked first.
  LogicalResult forEachEntry(
      const Node &node, StringRef where, ArrayRef<StringRef> known,
      llvm::function_ref<LogicalResult(StringRef, const Node &)> visit) {
    if (node.kind != Node::Kind::Mapping)
      return emitError(node.loc) << "expected a mapping for " << where;
    llvm::StringSet<> seen;
    for (const auto &[key, value] : node.entries) {
      if (!llvm::is_contained(known, key.scalar))
        return emitError(key.loc)
               << "unknown key \"" << key.scalar << "\" in " << where
               << ::fsdp::nearest(key.scalar, known);
      if (!seen.insert(key.scalar).second)
        return emitError(key.loc)
               << "key \"" << key.scalar << "\" is given twice";
      if (failed(visit(key.scalar, value)))
        return failure();
    }
    return success();
  }

  LogicalResult getBool(StringRef key, const Node &node, bool &result) {
    if (node.kind == Node::Kind::Scalar &&
        (node.scalar == "true" || node.scalar == "false")) {
      result = node.scalar == "true";
      return success();
    }
    return emitError(node.loc) << "expected true or false for \"" << key
                               << "\", got: " << describe(node);
  }

  LogicalResult getNumber(StringRef key, const Node &node, double &result) {
    if (node.kind == Node::Kind::Scalar &&
        !StringRef(node.scalar).getAsDouble(result))
      return success();
    return emitError(node.loc) << "expected a number for \"" << key
                               << "\", got: " << describe(node);
  }

  LogicalResult getInteger(StringRef key, const Node &node, int64_t &result) {
    if (node.kind == Node::Kind::Scalar &&
        !StringRef(node.scalar).getAsInteger(10, result))
      return success();
    return emitError(node.loc) << "expected an integer for \"" << key
                               << "\", got: " << describe(node);
  }

  /// Bytes: an integer, or a number with a unit (GB, GiB, MB, MiB, KB, KiB).
  LogicalResult getBytes(StringRef key, const Node &node, int64_t &bytes) {
    StringRef text = node.scalar;
    StringRef digits = text.take_while(
        [](char c) { return llvm::isDigit(c) || c == '.' || c == '-'; });
    double unit =
        llvm::StringSwitch<double>(text.drop_front(digits.size()).trim())
            .Case("", 1)
            .Case("GiB", 1LL << 30)
            .Case("MiB", 1LL << 20)
            .Case("KiB", 1LL << 10)
            .Case("GB", 1e9)
            .Case("MB", 1e6)
            .Case("KB", 1e3)
            .Default(0);
    double number;
    if (node.kind != Node::Kind::Scalar || unit == 0 ||
        digits.getAsDouble(number) || std::abs(number * unit) > 1e18)
      return emitError(node.loc)
             << "expected bytes for \"" << key
             << "\", such as 1000000000, 40GB or 37.5GiB, got: "
             << describe(node);
    bytes = std::llround(number * unit);
    return success();
  }

  /// A pattern, or a sequence of them.
  LogicalResult getPatterns(StringRef key, const Node &node,
                            SmallVectorImpl<StringRef> &patterns) {
    ArrayRef<Node> nodes(node);
    if (node.kind == Node::Kind::Sequence)
      nodes = node.elements;
    if (nodes.empty())
      return emitError(node.loc)
             << "expected at least one pattern for \"" << key << "\"";
    for (const Node &element : nodes) {
      if (element.kind != Node::Kind::Scalar || element.scalar.empty())
        return emitError(element.loc) << "expected a pattern for \"" << key
                                      << "\", got: " << describe(element);
      patterns.push_back(element.scalar);
    }
    return success();
  }

  static std::string describe(const Node &node) {
    switch (node.kind) {
    case Node::Kind::Null:
      return "nothing";
    case Node::Kind::Scalar:
      return "\"" + node.scalar + "\"";
    case Node::Kind::Sequence:
      return "a sequence";
    case Node::Kind::Mapping:
      return "a mapping";
    }
    llvm_unreachable("all kinds are listed");
  }

  ModuleOp module;
  StringRef path;
  bool syntaxError = false;
};

} // namespace mlir::fsdp

#endif // FSDP_IMPORT_CONFIGNODE_H
