//===- ConfigNode.cpp - a YAML config into checked nodes ------------------===//
#include "ConfigNode.h"

#include "fsdp/Support/Files.h"
#include "fsdp/Support/Nearest.h"
#include "fsdp/Support/YamlNodes.h"
#include "fsdp/Support/YamlText.h"
#include "mlir/IR/Builders.h"
#include "mlir/IR/Diagnostics.h"
#include "llvm/Support/FileSystem.h"
#include "llvm/Support/SourceMgr.h"

using namespace mlir;
using namespace mlir::fsdp;
namespace yaml = llvm::yaml;
using Node = ConfigNode;

//===----------------------------------------------------------------------===//
// Text to nodes
//===----------------------------------------------------------------------===//

namespace {
class ConfigParser {
public:
  ConfigParser(MLIRContext *context, StringRef path)
      : context(context), path(path) {
    // Whoever shows a place opens its file again, to show the line: a place in
    // a pipe or a device is given as `<stdin>` is, which is no path.
    bool isOther = false;
    if (!llvm::sys::fs::is_other(path, isOther) && isOther)
      this->path = ("<" + path + ">").str();
  }

  Location getLoc(unsigned line, unsigned column) {
    return FileLineColLoc::get(context, path, line, column);
  }

  FailureOr<Node> parse(llvm::MemoryBufferRef buffer) {
    if (auto defect = ::fsdp::findDefect(buffer.getBuffer()))
      return emitError(getLoc(defect->line, defect->column)) << defect->what;
    llvm::SourceMgr sources;
    sources.setDiagHandler(
        [](const llvm::SMDiagnostic &diag, void *self) {
          auto *parser = static_cast<ConfigParser *>(self);
          if (!std::exchange(parser->syntaxError, true))
            emitError(parser->getLoc(diag.getLineNo(), diag.getColumnNo() + 1))
                << diag.getMessage();
        },
        this);
    yaml::Stream stream(buffer, sources, /*ShowColors=*/false);
    Node root(getLoc(1, 1));
    auto document = stream.begin();
    yaml::Node *node = document->getRoot();
    if (node && failed(convert(sources, node, root)))
      return failure();
    std::optional<SMLoc> next = ::fsdp::findNextDocument(stream, document);
    if (stream.failed() || syntaxError)
      return failure();
    if (!node)
      return emitError(getLoc(1, 1)) << "expected YAML";
    if (next)
      return emitError(getLoc(sources, *next)) << ::fsdp::kOneDocument;
    return root;
  }

private:
  Location getLoc(llvm::SourceMgr &sources, SMLoc place) {
    auto [line, column] = sources.getLineAndColumn(place);
    return getLoc(line, column);
  }

  LogicalResult convert(llvm::SourceMgr &sources, yaml::Node *node,
                        Node &result, unsigned depth = 0) {
    if (syntaxError)
      return failure(); // the node may have no place in the file
    result.loc = getLoc(sources, ::fsdp::startOf(*node));
    if (!::fsdp::anchorOf(*node).empty())
      return emitError(result.loc) << ::fsdp::kNoAnchors;
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
    return emitError(result.loc) << "expected no block scalar";
  }

  MLIRContext *context;
  std::string path;
  bool syntaxError = false;
};
} // namespace

//===----------------------------------------------------------------------===//
// Nodes against the schema
//===----------------------------------------------------------------------===//

static std::string describe(const Node &node) {
  switch (node.kind) {
  case Node::Kind::Null:
    return "nothing";
  case Node::Kind::Scalar:
    return "\"" + node.scalar + "\"";
  case Node::Kind::Sequence:
    return node.elements.empty() ? "an empty sequence" : "a sequence";
  case Node::Kind::Mapping:
    return "a mapping";
  }
  llvm_unreachable("all kinds are listed");
}

static std::string quote(const PolicyKey &schema) {
  return schema.name.empty() ? "the config" : "\"" + schema.name + "\"";
}

static LogicalResult check(Node &node, const PolicyKey &schema);

/// The keys of a mapping: known, each once, with what they need.
static LogicalResult checkEntries(Node &node, const PolicyKey &schema) {
  for (auto &[key, value] : node.entries) {
    const PolicyKey *known = schema.find(key.scalar);
    if (!known) {
      SmallVector<StringRef> names;
      for (const PolicyKey &each : schema.keys)
        names.push_back(each.name);
      return emitError(key.loc)
             << "unknown key \"" << key.scalar << "\" in " << quote(schema)
             << ::fsdp::nearest(key.scalar, names);
    }
    if (node.find(key.scalar) != &value)
      return emitError(key.loc)
             << "key \"" << key.scalar << "\" is given twice";
    if (failed(check(value, *known)))
      return failure();
  }
  const Node *given = nullptr;
  for (StringRef name : schema.oneOf)
    if (const Node *value = node.find(name)) {
      if (given)
        return emitError(value->loc)
               << "expected \"" << llvm::join(schema.oneOf, "\" or \"")
               << "\" in " << quote(schema) << ", got both";
      given = value;
    }
  if (!given && !schema.oneOf.empty())
    return emitError(node.loc)
           << "expected a key \"" << llvm::join(schema.oneOf, "\" or \"")
           << "\" in " << quote(schema);
  for (const PolicyKey &each : schema.keys) {
    const Node *value = node.find(each.name);
    if (!value && each.required)
      return emitError(node.loc)
             << "expected a key " << quote(each) << " in " << quote(schema);
    if (value && !each.needs.empty() && !node.find(each.needs))
      return emitError(value->loc) << "expected \"" << each.needs << "\" with "
                                   << quote(each) << ", got none";
  }
  return success();
}

static LogicalResult check(Node &node, const PolicyKey &schema) {
  node.schema = &schema;
  auto hasType = [&](StringRef prefix) {
    return llvm::any_of(
        schema.types, [&](StringRef type) { return type.starts_with(prefix); });
  };
  if (node.kind == Node::Kind::Mapping) {
    if (hasType("mapping of ")) {
      for (auto &[key, value] : node.entries) {
        if (key.scalar.empty())
          return emitError(key.loc)
                 << "expected a name as key in " << quote(schema)
                 << ", got: " << describe(key);
        if (failed(check(value, schema.element[0])))
          return failure();
      }
      return success();
    }
    if (hasType("mapping"))
      return checkEntries(node, schema);
  } else if (node.kind == Node::Kind::Sequence) {
    bool isLong = schema.length
                      ? node.elements.size() == *schema.length
                      : !node.elements.empty() || !hasType("list of pattern");
    if (hasType("list of ") && isLong) {
      for (Node &element : node.elements)
        if (failed(check(element, schema.element[0])))
          return failure();
      return success();
    }
  } else if (node.kind == Node::Kind::Null ? hasType("null")
                                           : schema.accepts(node.scalar)) {
    return success();
  }
  return emitError(node.loc) << "expected " << schema.describe() << " for "
                             << quote(schema) << ", got: " << describe(node);
}

FailureOr<ConfigNode> mlir::fsdp::readConfig(MLIRContext *context,
                                             StringRef path) {
  ConfigParser parser(context, path);
  std::string text;
  if (std::string error =
          ::fsdp::readFile(path.str(), ::fsdp::kMaxYamlBytes, text);
      !error.empty())
    return emitError(parser.getLoc(1, 1)) << "the config " << error;
  FailureOr<Node> root = parser.parse({text, path});
  if (failed(root))
    return failure();
  if (root->kind == Node::Kind::Null)
    root->kind = Node::Kind::Mapping;
  if (failed(check(*root, getPolicySchema())))
    return failure();
  return root;
}

//===----------------------------------------------------------------------===//
// Nodes to values
//===----------------------------------------------------------------------===//

ArrayRef<ConfigNode> ConfigNode::items() const {
  return kind == Kind::Sequence ? ArrayRef(elements) : ArrayRef(*this);
}

SmallVector<StringRef> ConfigNode::getTexts() const {
  return llvm::map_to_vector(
      items(), [](const Node &node) { return StringRef(node.scalar); });
}

Attribute ConfigNode::toAttribute(MLIRContext *context) const {
  Builder builder(context);
  StringRef type = schema->types.empty() ? "" : StringRef(schema->types[0]);
  if (type == "bool")
    return builder.getBoolAttr(asBool());
  if (type == "integer")
    return builder.getI64IntegerAttr(asInteger());
  if (type == "bytes")
    return builder.getI64IntegerAttr(*toBytes(scalar));
  if (type == "number")
    return builder.getF64FloatAttr(asNumber());
  return builder.getStringAttr(scalar);
}

const ConfigNode *ConfigNode::find(StringRef key) const {
  if (kind != Kind::Mapping)
    return schema->standsFor == key ? this : nullptr;
  auto it = llvm::find_if(
      entries, [&](const auto &entry) { return entry.first.scalar == key; });
  return it == entries.end() ? nullptr : &it->second;
}

StringRef ConfigNode::getText(StringRef key) const {
  const Node *given = find(key);
  return given ? StringRef(given->scalar)
               : StringRef(*schema->find(key)->initial);
}
