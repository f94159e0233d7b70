//===- ConfigReader.cpp - a YAML policy into IR ---------------------------===//
//
// The names are FSDP2's, PyTorch's and torchtitan's. Every complaint carries
// file, line and column; an unknown key names the nearest known one.
//
//===----------------------------------------------------------------------===//
#include "ConfigNode.h"
#include "ScheduleConfig.h"
#include "TrainingConfig.h"
#include "fsdp/Dialect/FSDP.h"
#include "fsdp/Import/Import.h"
#include "fsdp/Support/Files.h"

#include "mlir/IR/Builders.h"
#include "llvm/ADT/StringSwitch.h"

using namespace mlir;
using namespace mlir::fsdp;

namespace {
class ConfigReader : ConfigNodeReader {
public:
  ConfigReader(ModuleOp module, StringRef path, int64_t worldSize)
      : ConfigNodeReader(module, path), worldSize(worldSize),
        builder(module.getContext()) {}

  LogicalResult run() {
    std::string text;
    if (std::string error =
            ::fsdp::readFile(path.str(), ::fsdp::kMaxYamlBytes, text);
        !error.empty())
      return emitError(getLoc(1, 1)) << "the config " << error;
    FailureOr<Node> root = parse({text, path});
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
    const Node *mesh = nullptr, *units = nullptr, *ignore = nullptr,
               *checkpoint = nullptr, *activations = nullptr,
               *precision = nullptr, *offload = nullptr, *reshard = nullptr,
               *placement = nullptr, *divideFactor = nullptr,
               *forceSum = nullptr, *schedule = nullptr;
    TrainingConfig training(module, path);
    SmallVector<StringRef> keys = {"mesh",
                                   "units",
                                   "ignore",
                                   "activation_checkpoint",
                                   "activation_offload",
                                   "mixed_precision",
                                   "cpu_offload",
                                   "gradient_divide_factor",
                                   "force_sum_reduction_for_comms",
                                   "reshard_after_forward",
                                   "shard_placement",
                                   "schedule"};
    llvm::append_range(keys, TrainingConfig::getKeys());
    if (failed(forEachEntry(
            root, "the config", keys, [&](StringRef key, const Node &value) {
              if (!training.take(key, value))
                (key == "mesh"                            ? mesh
                 : key == "units"                         ? units
                 : key == "ignore"                        ? ignore
                 : key == "activation_offload"            ? activations
                 : key == "mixed_precision"               ? precision
                 : key == "cpu_offload"                   ? offload
                 : key == "gradient_divide_factor"        ? divideFactor
                 : key == "force_sum_reduction_for_comms" ? forceSum
                 : key == "shard_placement"               ? placement
                 : key == "schedule"                      ? schedule
                 : key == "reshard_after_forward" ? reshard
                                                  : checkpoint) = &value;
              return success();
            })))
      return failure();
    return success(
        succeeded(applyMesh(mesh)) &&
        succeeded(readDivision(divideFactor, forceSum)) &&
        succeeded(applyRoot(precision, offload, reshard)) &&
        succeeded(applyUnits(units)) &&
        succeeded(applyCheckpoint(checkpoint)) &&
        succeeded(applyActivationOffload(activations)) &&
        succeeded(applyIgnore(ignore)) &&
        succeeded(applyPlacement(placement)) &&
        (!schedule ||
         succeeded(ScheduleConfig(module, path).apply(builder, *schedule))) &&
        succeeded(training.apply(builder)));
  }

  /// A bool, or the number of ranks in a group.
  LogicalResult readReshardAfterForward(const Node &node, BoolAttr &reshard,
                                        IntegerAttr &postForwardSize) {
    int64_t group;
    if (!StringRef(node.scalar).getAsInteger(10, group)) {
      postForwardSize = builder.getI64IntegerAttr(group);
      return success();
    }
    bool flag;
    if (failed(getBool("reshard_after_forward", node, flag)))
      return failure();
    reshard = builder.getBoolAttr(flag);
    return success();
  }

  /// The policy of the root unit; precision and offload are also those of every
  /// unit without its own.
  LogicalResult applyRoot(const Node *precision, const Node *offload,
                          const Node *reshard) {
    if (precision && failed(readMixedPrecision(*precision, globalPrecision)))
      return failure();
    if (offload && failed(getBool("cpu_offload", *offload, globalOffload)))
      return failure();
    BoolAttr reshards;
    IntegerAttr postForwardSize;
    if (reshard &&
        failed(readReshardAfterForward(*reshard, reshards, postForwardSize)))
      return failure();
    GradientDivisionAttr division;
    if (failed(globalDivision.get(builder, division)))
      return failure();
    if (!globalPrecision && !globalOffload && !division && !reshard)
      return success();
    Location loc = globalPrecision ? precision->loc
                   : globalOffload ? offload->loc
                   : division      ? *globalDivision.loc
                                   : reshard->loc;
    UnitPatternOp::create(builder, loc, builder.getStrArrayAttr({""}), reshards,
                          /*by_class=*/false, postForwardSize, globalPrecision,
                          globalOffload, division);
    return success();
  }

  /// How a unit divides gradients, as far as it is read.
  struct Division {
    std::optional<double> factor;
    bool forceSum = false;
    std::optional<Location> loc;

    /// Null where FSDP2's default holds.
    LogicalResult get(OpBuilder &builder, GradientDivisionAttr &result) const {
      if (!factor && !forceSum)
        return success();
      result = GradientDivisionAttr::getChecked(
          [&] { return emitError(*loc); }, builder.getContext(),
          factor ? builder.getF64FloatAttr(*factor) : FloatAttr(), forceSum);
      return success(static_cast<bool>(result));
    }
  };

  /// One of the two keys about division.
  LogicalResult readDivision(StringRef key, const Node &node,
                             Division &division) {
    if (!division.loc || key == "gradient_divide_factor")
      division.loc = node.loc;
    if (key == "force_sum_reduction_for_comms")
      return getBool(key, node, division.forceSum);
    division.factor.reset();
    if (node.kind == Node::Kind::Null ||
        (node.kind == Node::Kind::Scalar && node.scalar == "null"))
      return success();
    return getNumber(key, node, division.factor.emplace());
  }

  LogicalResult readDivision(const Node *factor, const Node *forceSum) {
    return success(
        (!factor || succeeded(readDivision("gradient_divide_factor", *factor,
                                           globalDivision))) &&
        (!forceSum || succeeded(readDivision("force_sum_reduction_for_comms",
                                             *forceSum, globalDivision))));
  }

  LogicalResult applyMesh(const Node *node) {
    int64_t replicate = 1, shard = -1;
    bool named = false;
    if (node && failed(forEachEntry(
                    *node, "\"mesh\"", {"replicate", "shard"},
                    [&](StringRef key, const Node &value) -> LogicalResult {
                      int64_t &size = key == "shard" ? shard : replicate;
                      named |= key == "replicate";
                      if (failed(getInteger(key, value, size)))
                        return failure();
                      if (size != -1 && size < 1)
                        return emitError(value.loc)
                               << "expected a positive size or -1 for \"" << key
                               << "\", got: " << size;
                      return success();
                    })))
      return failure();
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
    if (shard > worldSize || shard * replicate != worldSize)
      return emitError(node->loc)
             << "the mesh has " << shard * replicate
             << " ranks, expected the world size " << worldSize;
    createMesh(builder, named ? std::optional(replicate) : std::nullopt, shard,
               node ? node->loc : getLoc(1, 1));
    return success();
  }

  LogicalResult applyIgnore(const Node *node) {
    if (!node)
      return success();
    SmallVector<StringRef> patterns;
    if (failed(getPatterns("ignore", *node, patterns)))
      return failure();
    for (auto [index, pattern] : llvm::enumerate(patterns))
      IgnoreOp::create(builder,
                       node->elements.empty() ? node->loc
                                              : node->elements[index].loc,
                       pattern);
    return success();
  }

  /// Null for `false`, which is no mixed precision.
  LogicalResult readMixedPrecision(const Node &node,
                                   MixedPrecisionAttr &result) {
    result = {};
    if (node.kind == Node::Kind::Null || node.scalar == "false")
      return success();
    Type param, reduce, output;
    bool cast = true;
    if (failed(forEachEntry(node, "\"mixed_precision\"",
                            {"param_dtype", "reduce_dtype", "output_dtype",
                             "cast_forward_inputs"},
                            [&](StringRef key, const Node &value) {
                              if (key == "cast_forward_inputs")
                                return getBool(key, value, cast);
                              return getFloatType(key, value,
                                                  key == "param_dtype" ? param
                                                  : key == "reduce_dtype"
                                                      ? reduce
                                                      : output);
                            })))
      return failure();
    // Without dtypes nothing is cast.
    if (param || reduce || output)
      result = MixedPrecisionAttr::get(module.getContext(), param, reduce,
                                       output, cast);
    return success();
  }

  /// Null for `null`, no cast.
  LogicalResult getFloatType(StringRef key, const Node &node, Type &result) {
    if (node.kind == Node::Kind::Null ||
        (node.kind == Node::Kind::Scalar && node.scalar == "null"))
      return success();
    result = llvm::StringSwitch<Type>(node.scalar)
                 .Case("float32", builder.getF32Type())
                 .Case("float64", builder.getF64Type())
                 .Case("float16", builder.getF16Type())
                 .Case("bfloat16", builder.getBF16Type())
                 .Default(Type());
    if (result && node.kind == Node::Kind::Scalar)
      return success();
    return emitError(node.loc)
           << "expected float32, float64, float16 or bfloat16 for \"" << key
           << "\", got: " << describe(node);
  }

  LogicalResult applyPlacement(const Node *node) {
    if (!node)
      return success();
    if (node->kind != Node::Kind::Sequence)
      return emitError(node->loc)
             << "expected a sequence for \"shard_placement\", got: "
             << describe(*node);
    for (const Node &entry : node->elements) {
      const Node *match = nullptr;
      std::optional<int64_t> dim;
      if (failed(forEachEntry(
              entry, "\"shard_placement\"", {"match", "dim"},
              [&](StringRef key, const Node &value) -> LogicalResult {
                if (key == "dim")
                  return getInteger(key, value, dim.emplace());
                if (value.kind != Node::Kind::Scalar || value.scalar.empty())
                  return emitError(value.loc)
                         << "expected a pattern for \"match\", got: "
                         << describe(value);
                match = &value;
                return success();
              })))
        return failure();
      if (!match || !dim)
        return emitError(entry.loc) << "expected keys \"match\" and \"dim\" "
                                       "in \"shard_placement\"";
      ShardPlacementOp::create(builder, match->loc, match->scalar, *dim);
    }
    return success();
  }

  LogicalResult applyUnits(const Node *node) {
    if (!node)
      return success();
    if (node->kind == Node::Kind::Scalar && node->scalar == "auto") {
      // The capture casts at the units' boundaries: it must know them.
      if (globalPrecision)
        return emitError(node->loc) << "expected units by name or class with "
                                       "\"mixed_precision\", got: auto";
      AutoUnitsOp::create(builder, node->loc);
      return success();
    }
    if (node->kind != Node::Kind::Sequence)
      return emitError(node->loc)
             << "expected a sequence or auto for \"units\", got: "
             << describe(*node);
    for (const Node &unit : node->elements) {
      SmallVector<StringRef> patterns;
      bool byClass = false;
      Location matchLoc = unit.loc;
      BoolAttr reshard;
      IntegerAttr postForwardSize;
      MixedPrecisionAttr precision = globalPrecision;
      bool offload = globalOffload;
      Division division = globalDivision;
      if (failed(forEachEntry(
              unit, "\"units\"",
              {"match", "class", "reshard_after_forward", "mixed_precision",
               "cpu_offload", "gradient_divide_factor",
               "force_sum_reduction_for_comms"},
              [&](StringRef key, const Node &value) -> LogicalResult {
                if (key == "match" || key == "class") {
                  if (!patterns.empty())
                    return emitError(value.loc) << "expected \"match\" or "
                                                   "\"class\" in a unit, got "
                                                   "both";
                  byClass = key == "class";
                  matchLoc = value.loc;
                  if (byClass && value.kind == Node::Kind::Sequence)
                    return emitError(value.loc)
                           << "expected the name of a class for \"class\", "
                              "got: "
                           << describe(value);
                  return getPatterns(key, value, patterns);
                }
                if (key == "mixed_precision")
                  return readMixedPrecision(value, precision);
                if (key == "cpu_offload")
                  return getBool(key, value, offload);
                if (key != "reshard_after_forward")
                  return readDivision(key, value, division);
                return readReshardAfterForward(value, reshard, postForwardSize);
              })))
        return failure();
      if (patterns.empty())
        return emitError(unit.loc)
               << "expected a key \"match\" or \"class\" in a unit";
      GradientDivisionAttr gradientDivision;
      if (failed(division.get(builder, gradientDivision)))
        return failure();
      UnitPatternOp::create(
          builder, matchLoc, builder.getStrArrayAttr(patterns), reshard,
          byClass, postForwardSize, precision, offload, gradientDivision);
    }
    return success();
  }

  /// One policy for modules, or a sequence of them: calls `visit` with the
  /// pattern of each, and its further key `option`, null where it has none.
  LogicalResult forEachModulePolicy(
      StringRef key, const Node *node, StringRef option,
      llvm::function_ref<LogicalResult(const Node &match, const Node *option)>
          visit) {
    if (!node)
      return success();
    ArrayRef<Node> policies(*node);
    if (node->kind == Node::Kind::Sequence)
      policies = node->elements;
    std::string where = ("\"" + key + "\"").str();
    for (const Node &policy : policies) {
      const Node *match = nullptr, *other = nullptr;
      if (failed(forEachEntry(policy, where, {"match", option},
                              [&](StringRef entry, const Node &value) {
                                (entry == "match" ? match : other) = &value;
                                return success();
                              })))
        return failure();
      if (!match)
        return emitError(policy.loc) << "expected a key \"match\" in " << where;
      if (match->kind != Node::Kind::Scalar || match->scalar.empty())
        return emitError(match->loc)
               << "expected a pattern for \"match\", got: " << describe(*match);
      if (failed(visit(*match, other)))
        return failure();
    }
    return success();
  }

  LogicalResult applyCheckpoint(const Node *node) {
    auto create = [&](const Node &match, const Node *save) -> LogicalResult {
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
      return CheckpointPatternOp::create(builder, match.loc, match.scalar,
                                         saved)
          .verify();
    };
    return forEachModulePolicy("activation_checkpoint", node, "save", create);
  }

  LogicalResult applyActivationOffload(const Node *node) {
    auto create = [&](const Node &match, const Node *least) -> LogicalResult {
      OperationState state(match.loc, OffloadPatternOp::getOperationName());
      state.addAttribute("pattern", builder.getStringAttr(match.scalar));
      int64_t bytes;
      if (least) {
        if (failed(getBytes("min_bytes", *least, bytes)))
          return failure();
        state.addAttribute("min_bytes", builder.getI64IntegerAttr(bytes));
      }
      return cast<OffloadPatternOp>(builder.create(state)).verify();
    };
    return forEachModulePolicy("activation_offload", node, "min_bytes", create);
  }

public:
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

private:
  int64_t worldSize;
  OpBuilder builder;
  MixedPrecisionAttr globalPrecision;
  bool globalOffload = false;
  Division globalDivision;
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
  ConfigReader::createMesh(builder, /*replicate=*/std::nullopt, worldSize,
                           builder.getUnknownLoc());
  createDefaultOptimizer(builder, builder.getUnknownLoc());
  return success();
}
