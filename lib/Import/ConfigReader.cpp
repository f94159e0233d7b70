//===- ConfigReader.cpp - a YAML policy into IR ---------------------------===//
//
// The names are FSDP2's, PyTorch's and torchtitan's. Every complaint carries
// file, line and column; an unknown key names the nearest known one.
//
//===----------------------------------------------------------------------===//
#include "ConfigNode.h"
#include "TrainingConfig.h"
#include "fsdp/Dialect/FSDP.h"
#include "fsdp/Import/Import.h"

#include "mlir/IR/Builders.h"
#include "llvm/Support/MemoryBuffer.h"

using namespace mlir;
using namespace mlir::fsdp;

namespace {
class ConfigReader : ConfigNodeReader {
public:
  ConfigReader(ModuleOp module, StringRef path, int64_t worldSize)
      : ConfigNodeReader(module, path), worldSize(worldSize),
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
  // Values to policy
  //===--------------------------------------------------------------------===//

  LogicalResult apply(const Node &root) {
    const Node *mesh = nullptr, *units = nullptr, *checkpoint = nullptr;
    TrainingConfig training(module, path);
    SmallVector<StringRef> keys = {"mesh", "units", "activation_checkpoint"};
    llvm::append_range(keys, TrainingConfig::getKeys());
    if (failed(forEachEntry(root, "the config", keys,
                            [&](StringRef key, const Node &value) {
                              if (!training.take(key, value))
                                (key == "mesh"    ? mesh
                                 : key == "units" ? units
                                                  : checkpoint) = &value;
                              return success();
                            },
                            {"mixed_precision", "offload", "schedule"})))
      return failure();
    return success(succeeded(applyMesh(mesh)) && succeeded(applyUnits(units)) &&
                   succeeded(applyCheckpoint(checkpoint)) &&
                   succeeded(training.apply(builder)));
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

  LogicalResult applyCheckpoint(const Node *node) {
    if (!node)
      return success();
    // One policy, or a sequence of them.
    ArrayRef<Node> policies(*node);
    if (node->kind == Node::Kind::Sequence)
      policies = node->elements;
    for (const Node &policy : policies) {
      const Node *match = nullptr, *save = nullptr;
      if (failed(forEachEntry(policy, "\"activation_checkpoint\"",
                              {"match", "save"},
                              [&](StringRef key, const Node &value) {
                                (key == "match" ? match : save) = &value;
                                return success();
                              })))
        return failure();
      if (!match)
        return emitError(policy.loc)
               << "expected a key \"match\" in \"activation_checkpoint\"";
      if (match->kind != Node::Kind::Scalar || match->scalar.empty())
        return emitError(match->loc)
               << "expected a pattern for \"match\", got: " << describe(*match);
      ArrayAttr saved;
      if (save) {
        if (save->kind != Node::Kind::Sequence)
          return emitError(save->loc) << "expected a sequence of operators for "
                                         "\"save\", got: "
                                      << describe(*save);
        SmallVector<StringRef> names;
        for (const Node &name : save->elements) {
          if (name.kind != Node::Kind::Scalar)
            return emitError(name.loc)
                   << "expected an operator in \"save\", got: "
                   << describe(name);
          names.push_back(name.scalar);
        }
        saved = builder.getStrArrayAttr(names);
      }
      // CheckpointPattern-1 checks the names, at this place in the file.
      auto op = CheckpointPatternOp::create(builder, match->loc, match->scalar,
                                            saved);
      if (failed(op.verify()))
        return failure();
    }
    return success();
  }

public:
  static void createMesh(OpBuilder &builder, int64_t ranks, Location loc) {
    MLIRContext *context = builder.getContext();
    MeshOp::create(builder, loc, "world",
                   MeshAttr::get(context, MeshAxisAttr::get(
                                              context, shardAxisName, ranks)));
  }

private:
  int64_t worldSize;
  OpBuilder builder;
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
  createDefaultOptimizer(builder, builder.getUnknownLoc());
  return success();
}
