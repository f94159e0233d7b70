//===- ConfigReader.cpp - a YAML policy into IR ---------------------------===//
//
// The names are FSDP2's, PyTorch's and torchtitan's. What a key may hold is
// checked before (ConfigNode.h); what several keys say together is checked
// here, and by the ops' verifiers at their place in the file.
//
//===----------------------------------------------------------------------===//
#include "ConfigNode.h"
#include "TrainingConfig.h"
#include "fsdp/Dialect/FSDP.h"
#include "fsdp/Import/Import.h"

#include "mlir/IR/Builders.h"
#include "llvm/ADT/StringSwitch.h"
#include "llvm/Support/MathExtras.h"
#include "llvm/Support/Path.h"

using namespace mlir;
using namespace mlir::fsdp;
using Node = ConfigNode;

/// Without `replicate` the mesh has one axis.
static void createMesh(OpBuilder &builder, std::optional<int64_t> replicate,
                       int64_t shard, Location loc) {
  MLIRContext *context = builder.getContext();
  SmallVector<MeshAxisAttr> axes;
  if (replicate)
    axes.push_back(MeshAxisAttr::get(context, replicateAxisName, *replicate));
  axes.push_back(MeshAxisAttr::get(context, shardAxisName, shard));
  MeshOp::create(builder, loc, "world", MeshAttr::get(context, axes));
}

namespace {
class ConfigReader {
public:
  ConfigReader(ModuleOp module, StringRef path, int64_t worldSize)
      : path(path), worldSize(worldSize), builder(module.getContext()) {
    builder.setInsertionPointToStart(module.getBody());
  }

  LogicalResult run() {
    FailureOr<Node> root = readConfig(builder.getContext(), path);
    if (failed(root))
      return failure();
    using Apply = LogicalResult (ConfigReader::*)(const Node &);
    std::pair<StringRef, Apply> keys[] = {
        {"units", &ConfigReader::applyUnits},
        {"activation_checkpoint", &ConfigReader::applyCheckpoint},
        {"activation_offload", &ConfigReader::applyActivationOffload},
        {"ignore", &ConfigReader::applyIgnore},
        {"shard_placement", &ConfigReader::applyPlacement},
        {"schedule", &ConfigReader::applySchedule}};
    if (failed(applyMesh(*root)))
      return failure();
    applyRoot(*root);
    for (auto [key, apply] : keys)
      if (const Node *node = root->find(key);
          node && failed((this->*apply)(*node)))
        return failure();
    return applyTraining(builder, *root);
  }

private:
  /// What the root unit gives to every unit without its own.
  struct UnitPolicy {
    MixedPrecisionAttr precision;
    bool offload = false;
    std::optional<double> divideFactor;
    bool forceSum = false;

    GradientDivisionAttr getDivision(OpBuilder &builder) const {
      if (!divideFactor && !forceSum)
        return {};
      return GradientDivisionAttr::get(
          builder.getContext(),
          divideFactor ? builder.getF64FloatAttr(*divideFactor) : FloatAttr(),
          forceSum);
    }
  };

  /// The keys that the root and a unit have alike.
  UnitPolicy readUnitPolicy(const Node &node, UnitPolicy policy) {
    if (const Node *precision = node.find("mixed_precision"))
      policy.precision = readMixedPrecision(*precision);
    if (const Node *offload = node.find("cpu_offload"))
      policy.offload = offload->asBool();
    if (const Node *factor = node.find("gradient_divide_factor"))
      policy.divideFactor =
          factor->isNull() ? std::nullopt : std::optional(factor->asNumber());
    if (const Node *forceSum = node.find("force_sum_reduction_for_comms"))
      policy.forceSum = forceSum->asBool();
    return policy;
  }

  /// Null for `false`, which is no mixed precision, and where nothing is cast.
  MixedPrecisionAttr readMixedPrecision(const Node &node) {
    if (node.kind != Node::Kind::Mapping)
      return {};
    auto dtype = [&](StringRef key) {
      return llvm::StringSwitch<Type>(node.getText(key))
          .Case("float32", builder.getF32Type())
          .Case("float64", builder.getF64Type())
          .Case("float16", builder.getF16Type())
          .Case("bfloat16", builder.getBF16Type())
          .Default(Type());
    };
    Type param = dtype("param_dtype"), reduce = dtype("reduce_dtype"),
         output = dtype("output_dtype");
    if (!param && !reduce && !output)
      return {};
    return MixedPrecisionAttr::get(builder.getContext(), param, reduce, output,
                                   node.getBool("cast_forward_inputs"));
  }

  void createUnitPattern(Location loc, ArrayRef<StringRef> patterns,
                         bool byClass, const Node *reshard,
                         const UnitPolicy &policy) {
    BoolAttr reshards;
    IntegerAttr postForwardSize;
    if (reshard && toInteger(reshard->scalar))
      postForwardSize = builder.getI64IntegerAttr(reshard->asInteger());
    else if (reshard)
      reshards = builder.getBoolAttr(reshard->asBool());
    UnitPatternOp::create(builder, loc, builder.getStrArrayAttr(patterns),
                          reshards, byClass, postForwardSize, policy.precision,
                          policy.offload, policy.getDivision(builder));
  }

  void applyRoot(const Node &root) {
    rootPolicy = readUnitPolicy(root, {});
    const Node *reshard = root.find("reshard_after_forward");
    const Node *factor = root.find("gradient_divide_factor");
    const Node *place = nullptr;
    if (rootPolicy.precision)
      place = root.find("mixed_precision");
    else if (rootPolicy.offload)
      place = root.find("cpu_offload");
    else if (rootPolicy.getDivision(builder))
      place = factor ? factor : root.find("force_sum_reduction_for_comms");
    else
      place = reshard;
    if (place)
      createUnitPattern(place->loc, {""}, /*byClass=*/false, reshard,
                        rootPolicy);
  }

  LogicalResult applyMesh(const Node &root) {
    const Node *node = root.find("mesh");
    if (!node) {
      createMesh(builder, std::nullopt, worldSize, root.loc);
      return success();
    }
    bool named = node->find("replicate");
    int64_t replicate = named ? node->getInteger("replicate") : 1;
    int64_t shard = node->getInteger("shard");
    if (shard == -1 && replicate == -1)
      return emitError(node->loc)
             << "expected a size for \"shard\" or \"replicate\" of \"mesh\", "
                "got -1 for both (-1 is the default of \"shard\")";
    int64_t &inferred = shard == -1 ? shard : replicate;
    int64_t given = shard == -1 ? replicate : shard;
    if (inferred == -1) {
      if (worldSize % given != 0)
        return emitError(node->loc)
               << "expected the mesh to divide the world size " << worldSize
               << ", got: " << given << " ranks on one axis";
      inferred = worldSize / given;
    }
    if (auto ranks = llvm::SaturatingMultiply<uint64_t>(shard, replicate);
        ranks != static_cast<uint64_t>(worldSize))
      return emitError(node->loc)
             << "the mesh has " << ranks << " ranks, expected the world size "
             << worldSize;
    createMesh(builder, named ? std::optional(replicate) : std::nullopt, shard,
               node->loc);
    return success();
  }

  LogicalResult applyUnits(const Node &node) {
    if (node.is("auto")) {
      // The capture casts at the units' boundaries: it must know them.
      if (rootPolicy.precision)
        return emitError(node.loc) << "expected units by name or class with "
                                      "\"mixed_precision\", got: auto";
      AutoUnitsOp::create(builder, node.loc);
      return success();
    }
    for (const Node &unit : node.elements) {
      const Node *byClass = unit.find("class");
      const Node &match = byClass ? *byClass : *unit.find("match");
      createUnitPattern(match.loc, match.getTexts(), byClass,
                        unit.find("reshard_after_forward"),
                        readUnitPolicy(unit, rootPolicy));
    }
    return success();
  }

  LogicalResult applyCheckpoint(const Node &node) {
    for (const Node &policy : node.items()) {
      const Node *match = policy.find("match"), *save = policy.find("save");
      ArrayAttr saved;
      if (save)
        saved = builder.getStrArrayAttr(
            save->is(productsName) ? SmallVector<StringRef>{productsName}
                                   : save->getTexts());
      // CheckpointPattern-1 checks the names, at this place in the file.
      if (failed(CheckpointPatternOp::create(builder, match->loc, match->scalar,
                                             saved)
                     .verify()))
        return failure();
    }
    return success();
  }

  LogicalResult applyActivationOffload(const Node &node) {
    for (const Node &policy : node.items()) {
      const Node *match = policy.find("match");
      OffloadPatternOp::create(builder, match->loc, match->scalar,
                               *toBytes(policy.getText("min_bytes")));
    }
    return success();
  }

  LogicalResult applyIgnore(const Node &node) {
    for (const Node &pattern : node.items())
      IgnoreOp::create(builder, pattern.loc, pattern.scalar);
    return success();
  }

  LogicalResult applyPlacement(const Node &node) {
    for (const Node &entry : node.elements) {
      const Node *match = entry.find("match");
      ShardPlacementOp::create(builder, match->loc, match->scalar,
                               entry.getInteger("dim"));
    }
    return success();
  }

  LogicalResult applySchedule(const Node &node) {
    OperationState state(node.loc, ScheduleOp::getOperationName());
    if (node.is("fsdp2")) {
      state.addAttribute("prefetch", builder.getStringAttr("fsdp2"));
      state.addAttribute("reduce_scatters_in_flight",
                         builder.getI64IntegerAttr(1));
    }
    for (const auto &[key, value] : node.entries) {
      Attribute attr = value.toAttribute(builder.getContext());
      if (key.is("device") && llvm::sys::path::has_extension(value.scalar) &&
          llvm::sys::path::is_relative(value.scalar)) {
        // A description's file lies beside the config.
        SmallString<128> file(llvm::sys::path::parent_path(path));
        llvm::sys::path::append(file, value.scalar);
        attr = builder.getStringAttr(file);
      }
      state.addAttribute(key.scalar, attr);
    }
    return cast<ScheduleOp>(builder.create(state)).verify();
  }

  StringRef path;
  int64_t worldSize;
  OpBuilder builder;
  UnitPolicy rootPolicy;
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
  createMesh(builder, /*replicate=*/std::nullopt, worldSize,
             builder.getUnknownLoc());
  createDefaultOptimizer(builder, builder.getUnknownLoc());
  return success();
}
