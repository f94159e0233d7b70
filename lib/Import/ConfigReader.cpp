//===- ConfigReader.cpp - a YAML policy into IR ---------------------------===//
//
// The names are FSDP2's, PyTorch's and torchtitan's. Every complaint carries
// file, line and column; an unknown key names the nearest known one.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Dialect/FSDP.h"
#include "fsdp/Import/Import.h"

#include "mlir/IR/Builders.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/ADT/StringSet.h"
#include "llvm/Support/MemoryBuffer.h"
#include "llvm/Support/SourceMgr.h"
#include "llvm/Support/YAMLParser.h"

using namespace mlir;
using namespace mlir::fsdp;
namespace yaml = llvm::yaml;

namespace {
/// A parsed YAML node with its position.
struct Node {
  enum class Kind { Null, Scalar, Sequence, Mapping } kind = Kind::Null;
  Location loc;
  std::string scalar;
  std::vector<Node> elements;
  std::vector<std::pair<Node, Node>> entries; // key, value

  explicit Node(Location loc) : loc(loc) {}
};

class ConfigReader {
public:
  ConfigReader(ModuleOp module, StringRef path, int64_t worldSize)
      : module(module), path(path), worldSize(worldSize),
        builder(module.getContext()) {}

  LogicalResult run() {
    auto buffer = llvm::MemoryBuffer::getFile(path, /*IsText=*/true);
    if (!buffer)
      return emitError(getLoc(1, 1))
             << "cannot read the config: " << buffer.getError().message();
    FailureOr<Node> root = parse((*buffer)->getMemBufferRef());
    if (failed(root))
      return failure();
    builder.setInsertionPointToStart(module.getBody());
    if (root->kind == Node::Kind::Null)
      return applyDefaultConfig(module, worldSize);
    return apply(*root);
  }

private:
  //===--------------------------------------------------------------------===//
  // Text to nodes
  //===--------------------------------------------------------------------===//

  Location getLoc(unsigned line, unsigned column) {
    return FileLineColLoc::get(module.getContext(), path, line, column);
  }

  FailureOr<Node> parse(llvm::MemoryBufferRef buffer) {
    llvm::SourceMgr sources;
    sources.setDiagHandler(
        [](const llvm::SMDiagnostic &diag, void *self) {
          auto *reader = static_cast<ConfigReader *>(self);
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
                        Node &result) {
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
    if (auto *sequence = dyn_cast<yaml::SequenceNode>(node)) {
      result.kind = Node::Kind::Sequence;
      for (yaml::Node &element : *sequence) {
        result.elements.emplace_back(result.loc);
        if (failed(convert(sources, &element, result.elements.back())))
          return failure();
      }
      return success(!syntaxError);
    }
    if (auto *mapping = dyn_cast<yaml::MappingNode>(node)) {
      result.kind = Node::Kind::Mapping;
      for (yaml::KeyValueNode &entry : *mapping) {
        Node key(result.loc), value(result.loc);
        yaml::Node *keyNode = entry.getKey();
        if (!keyNode || failed(convert(sources, keyNode, key)))
          return failure();
        yaml::Node *valueNode = entry.getValue();
        if (!valueNode || failed(convert(sources, valueNode, value)))
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

  static std::string nearest(StringRef key, ArrayRef<StringRef> known) {
    StringRef best;
    unsigned bestDistance = 4;
    for (StringRef candidate : known)
      if (unsigned distance = key.edit_distance(candidate);
          distance < bestDistance) {
        bestDistance = distance;
        best = candidate;
      }
    if (best.empty())
      return "; known keys are: " + llvm::join(known, ", ");
    return ", did you mean \"" + best.str() + "\"?";
  }

  /// Calls `visit(key, value)` for each entry; keys are checked first.
  LogicalResult
  forEachEntry(const Node &node, StringRef where, ArrayRef<StringRef> known,
               llvm::function_ref<LogicalResult(StringRef, const Node &)> visit,
               ArrayRef<StringRef> notYet = {}) {
    if (node.kind != Node::Kind::Mapping)
      return emitError(node.loc) << "expected a mapping for " << where;
    llvm::StringSet<> seen;
    for (const auto &[key, value] : node.entries) {
      if (llvm::is_contained(notYet, key.scalar))
        return emitError(key.loc)
               << "key \"" << key.scalar << "\" is not supported yet";
      if (!llvm::is_contained(known, key.scalar))
        return emitError(key.loc) << "unknown key \"" << key.scalar << "\" in "
                                  << where << nearest(key.scalar, known);
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

  //===--------------------------------------------------------------------===//
  // Values to policy
  //===--------------------------------------------------------------------===//

  LogicalResult apply(const Node &root) {
    const Node *mesh = nullptr, *units = nullptr, *optimizer = nullptr;
    if (failed(forEachEntry(root, "the config", {"mesh", "units", "optimizer"},
                            [&](StringRef key, const Node &value) {
                              (key == "mesh"    ? mesh
                               : key == "units" ? units
                                                : optimizer) = &value;
                              return success();
                            },
                            {"mixed_precision", "offload", "clip_grad_norm",
                             "gradient_accumulation_steps",
                             "activation_checkpoint", "schedule"})))
      return failure();
    return success(succeeded(applyMesh(mesh)) && succeeded(applyUnits(units)) &&
                   succeeded(applyOptimizer(optimizer)));
  }

  LogicalResult applyMesh(const Node *node) {
    int64_t replicate = 1, shard = -1;
    if (node &&
        failed(forEachEntry(
            *node, "\"mesh\"", {"replicate", "shard"},
            [&](StringRef key, const Node &value) -> LogicalResult {
              int64_t &size = key == "shard" ? shard : replicate;
              if (failed(getInteger(key, value, size)))
                return failure();
              if (size != -1 && size < 1)
                return emitError(value.loc)
                       << "expected a positive size or -1 for \"" << key
                       << "\", got: " << size;
              if (key == "replicate" && size != 1)
                return emitError(value.loc)
                       << "\"replicate\" other than 1 is not supported yet";
              return success();
            })))
      return failure();
    if (shard == -1)
      shard = worldSize;
    if (shard != worldSize)
      return emitError(node->loc)
             << "the mesh has " << shard << " ranks, expected the world size "
             << worldSize;
    createMesh(builder, worldSize, node ? node->loc : getLoc(1, 1));
    return success();
  }

  LogicalResult applyUnits(const Node *node) {
    if (!node)
      return success();
    if (node->kind != Node::Kind::Sequence)
      return emitError(node->loc) << "expected a sequence for \"units\"";
    for (const Node &unit : node->elements) {
      StringAttr match;
      Location matchLoc = unit.loc;
      BoolAttr reshard;
      if (failed(forEachEntry(
              unit, "\"units\"", {"match", "reshard_after_forward"},
              [&](StringRef key, const Node &value) -> LogicalResult {
                if (key == "match") {
                  if (value.kind != Node::Kind::Scalar || value.scalar.empty())
                    return emitError(value.loc)
                           << "expected a pattern for \"match\", got: "
                           << describe(value);
                  match = builder.getStringAttr(value.scalar);
                  matchLoc = value.loc;
                  return success();
                }
                int64_t group;
                if (!StringRef(value.scalar).getAsInteger(10, group))
                  return emitError(value.loc)
                         << "an integer \"reshard_after_forward\" is not "
                            "supported yet";
                bool flag;
                if (failed(getBool(key, value, flag)))
                  return failure();
                reshard = builder.getBoolAttr(flag);
                return success();
              },
              {"mixed_precision"})))
        return failure();
      if (!match)
        return emitError(unit.loc) << "expected a key \"match\" in a unit";
      UnitPatternOp::create(builder, matchLoc, match, reshard);
    }
    return success();
  }

  LogicalResult applyOptimizer(const Node *node) {
    if (!node) {
      createDefaultOptimizer(builder, getLoc(1, 1));
      return success();
    }
    std::string name = "adamw";
    SmallVector<NamedAttribute> hyperparameters;
    auto add = [&](StringRef key, double value) {
      hyperparameters.push_back(
          builder.getNamedAttr(key, builder.getF64FloatAttr(value)));
    };
    if (failed(forEachEntry(
            *node, "\"optimizer\"",
            {"name", "lr", "betas", "eps", "weight_decay", "momentum",
             "dampening", "nesterov", "amsgrad", "maximize", "fused"},
            [&](StringRef key, const Node &value) -> LogicalResult {
              if (key == "name") {
                name = value.scalar;
                return success();
              }
              if (key == "betas") {
                double betas[2];
                if (value.kind != Node::Kind::Sequence ||
                    value.elements.size() != 2)
                  return emitError(value.loc)
                         << "expected two numbers for \"betas\"";
                for (auto [element, beta] : llvm::zip(value.elements, betas))
                  if (failed(getNumber(key, element, beta)))
                    return failure();
                add("beta1", betas[0]);
                add("beta2", betas[1]);
                return success();
              }
              if (llvm::is_contained(
                      {"nesterov", "amsgrad", "maximize", "fused"}, key)) {
                bool flag;
                if (failed(getBool(key, value, flag)))
                  return failure();
                hyperparameters.push_back(
                    builder.getNamedAttr(key, builder.getBoolAttr(flag)));
                return success();
              }
              double number;
              if (failed(getNumber(key, value, number)))
                return failure();
              add(key, number);
              return success();
            })))
      return failure();
    // Optimizer-1 checks names and ranges, at this place in the file.
    auto op = OptimizerOp::create(builder, node->loc, name,
                                  builder.getDictionaryAttr(hyperparameters));
    return op.verify();
  }

public:
  static void createMesh(OpBuilder &builder, int64_t ranks, Location loc) {
    MLIRContext *context = builder.getContext();
    MeshOp::create(builder, loc, "world",
                   MeshAttr::get(context, MeshAxisAttr::get(
                                              context, shardAxisName, ranks)));
  }

  static void createDefaultOptimizer(OpBuilder &builder, Location loc) {
    OptimizerOp::create(builder, loc, "adamw", builder.getDictionaryAttr({}));
  }

private:
  ModuleOp module;
  StringRef path;
  int64_t worldSize;
  OpBuilder builder;
  bool syntaxError = false;
};
} // namespace

LogicalResult mlir::fsdp::applyConfig(ModuleOp module, StringRef path,
                                      int64_t worldSize) {
  return ConfigReader(module, path, worldSize).run();
}

LogicalResult mlir::fsdp::applyDefaultConfig(ModuleOp module,
                                             int64_t worldSize) {
  OpBuilder builder(module.getContext());
  builder.setInsertionPointToStart(module.getBody());
  ConfigReader::createMesh(builder, worldSize, builder.getUnknownLoc());
  ConfigReader::createDefaultOptimizer(builder, builder.getUnknownLoc());
  return success();
}
