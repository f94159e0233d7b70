//===- TrainingConfig.cpp - the config's keys about the update ------------===//
#include "TrainingConfig.h"

#include "fsdp/Dialect/FSDP.h"

#include <cmath>

using namespace mlir;
using namespace mlir::fsdp;

static constexpr StringRef hyperparameterKeys[] = {
    "lr",       "betas",   "eps",      "weight_decay", "momentum", "dampening",
    "nesterov", "amsgrad", "maximize", "fused",        "foreach",  "options"};

ArrayRef<StringRef> TrainingConfig::getKeys() {
  static constexpr StringRef keys[] = {"optimizer",
                                       "lr_schedule",
                                       "clip_grad_norm",
                                       "gradient_accumulation_steps",
                                       "reduce_each_microbatch",
                                       "all_reduce_each_microbatch",
                                       "reshard_after_backward",
                                       "grad_scaler"};
  return keys;
}

bool TrainingConfig::take(StringRef key, const Node &value) {
  const Node *&place = key == "optimizer"        ? optimizer
                       : key == "lr_schedule"    ? schedule
                       : key == "clip_grad_norm" ? clipping
                       : key == "gradient_accumulation_steps"
                           ? accumulationSteps
                       : key == "reduce_each_microbatch"     ? reduceEach
                       : key == "all_reduce_each_microbatch" ? allReduceEach
                       : key == "grad_scaler" ? scaler
                                              : reshardAfterBackward;
  if (!llvm::is_contained(getKeys(), key))
    return false;
  place = &value;
  return true;
}

LogicalResult TrainingConfig::apply(OpBuilder &builder) {
  if (failed(applyOptimizer(builder, optimizer)))
    return failure();
  if (schedule && failed(applySchedule(builder, *schedule)))
    return failure();
  if (clipping && failed(applyClipping(builder, *clipping)))
    return failure();
  if (scaler && failed(applyScaler(builder, *scaler)))
    return failure();
  return applyAccumulation(builder);
}

LogicalResult
TrainingConfig::readHyperparameter(OpBuilder &builder, StringRef key,
                                   const Node &value,
                                   SmallVectorImpl<NamedAttribute> &result) {
  auto add = [&](StringRef name, Attribute attr) {
    result.push_back(builder.getNamedAttr(name, attr));
  };
  if (key == "betas") {
    double betas[2];
    if (value.kind != Node::Kind::Sequence || value.elements.size() != 2)
      return emitError(value.loc) << "expected two numbers for \"betas\"";
    for (auto [element, beta] : llvm::zip(value.elements, betas))
      if (failed(getNumber(key, element, beta)))
        return failure();
    add("beta1", builder.getF64FloatAttr(betas[0]));
    add("beta2", builder.getF64FloatAttr(betas[1]));
    return success();
  }
  if (llvm::is_contained(
          {"nesterov", "amsgrad", "maximize", "fused", "foreach"}, key)) {
    bool flag;
    if (failed(getBool(key, value, flag)))
      return failure();
    add(key, builder.getBoolAttr(flag));
    return success();
  }
  if (key == "options") {
    // A plug-in's own hyperparameters; the op checks that it is a plug-in.
    if (value.kind != Node::Kind::Mapping)
      return emitError(value.loc) << "expected a mapping for \"options\"";
    for (const auto &[name, number] : value.entries) {
      double option;
      if (failed(getNumber(name.scalar, number, option)))
        return failure();
      if (llvm::is_contained({"lr", "library"}, name.scalar) ||
          llvm::any_of(result, [&](NamedAttribute attr) {
            return attr.getName() == name.scalar;
          }))
        return emitError(name.loc)
               << "key \"" << name.scalar << "\" is given twice";
      add(name.scalar, builder.getF64FloatAttr(option));
    }
    return success();
  }
  double number;
  if (failed(getNumber(key, value, number)))
    return failure();
  add(key, builder.getF64FloatAttr(number));
  return success();
}

LogicalResult TrainingConfig::applyOptimizer(OpBuilder &builder,
                                             const Node *node) {
  if (!node) {
    createDefaultOptimizer(builder, getLoc(1, 1));
    return success();
  }
  std::string name = "adamw";
  const Node *groups = nullptr;
  SmallVector<NamedAttribute> hyperparameters;
  SmallVector<StringRef> keys = {"name"};
  llvm::append_range(keys, hyperparameterKeys);
  llvm::append_range(keys, ArrayRef<StringRef>{"library", "groups"});
  if (failed(forEachEntry(
          *node, "\"optimizer\"", keys,
          [&](StringRef key, const Node &value) -> LogicalResult {
            if (key == "name") {
              name = value.scalar;
              return success();
            }
            if (key == "groups") {
              groups = &value;
              return success();
            }
            if (key == "library") {
              if (value.kind != Node::Kind::Scalar || value.scalar.empty())
                return emitError(value.loc)
                       << "expected a path for \"library\", got: "
                       << describe(value);
              hyperparameters.push_back(builder.getNamedAttr(
                  key, builder.getStringAttr(value.scalar)));
              return success();
            }
            return readHyperparameter(builder, key, value, hyperparameters);
          })))
    return failure();
  // The op's invariants are checked at this place in the file.
  auto op = OptimizerOp::create(builder, node->loc, name,
                                builder.getDictionaryAttr(hyperparameters));
  if (failed(op.verify()))
    return failure();
  if (!groups)
    return success();
  if (groups->kind != Node::Kind::Sequence)
    return emitError(groups->loc) << "expected a sequence for \"groups\"";
  for (const Node &group : groups->elements)
    if (failed(applyGroup(builder, group)))
      return failure();
  return success();
}

LogicalResult TrainingConfig::applyGroup(OpBuilder &builder, const Node &node) {
  SmallVector<StringRef> patterns;
  Location matchLoc = node.loc;
  SmallVector<NamedAttribute> hyperparameters;
  SmallVector<StringRef> keys = {"match"};
  llvm::append_range(keys, hyperparameterKeys);
  if (failed(forEachEntry(
          node, "\"groups\"", keys,
          [&](StringRef key, const Node &value) -> LogicalResult {
            if (key != "match")
              return readHyperparameter(builder, key, value, hyperparameters);
            matchLoc = value.loc;
            return getPatterns(key, value, patterns);
          })))
    return failure();
  if (patterns.empty())
    return emitError(node.loc) << "expected a key \"match\" in a group";
  auto op =
      ParamGroupOp::create(builder, matchLoc, builder.getStrArrayAttr(patterns),
                           builder.getDictionaryAttr(hyperparameters));
  return op.verify();
}

LogicalResult TrainingConfig::applySchedule(OpBuilder &builder,
                                            const Node &node) {
  int64_t warmup = 0, total = 0;
  double ratio = 0;
  std::string decay = "constant";
  bool hasTotal = false, hasRatio = false;
  if (failed(
          forEachEntry(node, "\"lr_schedule\"",
                       {"warmup_steps", "decay", "total_steps", "min_lr_ratio"},
                       [&](StringRef key, const Node &value) -> LogicalResult {
                         if (key == "decay") {
                           decay = value.scalar;
                           return success();
                         }
                         if (key == "min_lr_ratio") {
                           hasRatio = true;
                           return getNumber(key, value, ratio);
                         }
                         hasTotal |= key == "total_steps";
                         return getInteger(
                             key, value, key == "total_steps" ? total : warmup);
                       })))
    return failure();
  if (decay == "constant" && (hasTotal || hasRatio))
    return emitError(node.loc)
           << "expected no \"" << (hasTotal ? "total_steps" : "min_lr_ratio")
           << "\" with a decay of \"constant\"";
  if (decay == "constant")
    total = warmup + 1;
  else if (!hasTotal)
    return emitError(node.loc)
           << "expected a key \"total_steps\" with a decay of \"" << decay
           << "\"";
  auto op = LRScheduleOp::create(builder, node.loc, warmup, decay, total,
                                 APFloat(ratio));
  return op.verify();
}

LogicalResult TrainingConfig::applyClipping(OpBuilder &builder,
                                            const Node &node) {
  double maxNorm = 0, normType = 2;
  if (node.kind == Node::Kind::Scalar) {
    if (failed(getNumber("clip_grad_norm", node, maxNorm)))
      return failure();
  } else {
    bool hasMaxNorm = false;
    if (failed(forEachEntry(
            node, "\"clip_grad_norm\"", {"max_norm", "norm_type"},
            [&](StringRef key, const Node &value) -> LogicalResult {
              hasMaxNorm |= key == "max_norm";
              return getNumber(key, value,
                               key == "max_norm" ? maxNorm : normType);
            })))
      return failure();
    if (!hasMaxNorm)
      return emitError(node.loc)
             << "expected a key \"max_norm\" in \"clip_grad_norm\"";
  }
  auto op = GradientClippingOp::create(builder, node.loc, APFloat(maxNorm),
                                       APFloat(normType));
  return op.verify();
}

LogicalResult TrainingConfig::applyAccumulation(OpBuilder &builder) {
  std::pair<StringRef, const Node *> flags[] = {
      {"reduce_each_microbatch", reduceEach},
      {"all_reduce_each_microbatch", allReduceEach},
      {"reshard_after_backward", reshardAfterBackward}};
  for (auto [key, node] : flags)
    if (!accumulationSteps && node)
      return emitError(node->loc)
             << "expected \"gradient_accumulation_steps\" with \"" << key
             << "\", got none";
  if (!accumulationSteps)
    return success();
  int64_t steps = 0;
  bool reduce = true, allReduce = true, reshard = true;
  if (failed(getInteger("gradient_accumulation_steps", *accumulationSteps,
                        steps)) ||
      (reduceEach &&
       failed(getBool("reduce_each_microbatch", *reduceEach, reduce))) ||
      (allReduceEach && failed(getBool("all_reduce_each_microbatch",
                                       *allReduceEach, allReduce))) ||
      (reshardAfterBackward && failed(getBool("reshard_after_backward",
                                              *reshardAfterBackward, reshard))))
    return failure();
  if (allReduceEach && allReduce && !reduce)
    return emitError(allReduceEach->loc)
           << "expected no \"all_reduce_each_microbatch\" of microbatches that "
              "are not reduced, got: true";
  auto op = AccumulationOp::create(builder, accumulationSteps->loc, steps,
                                   reduce, reshard, allReduce);
  return op.verify();
}

LogicalResult TrainingConfig::applyScaler(OpBuilder &builder,
                                          const Node &node) {
  // torch.amp.GradScaler's defaults.
  double scale = 65536, growth = 2, backoff = 0.5;
  int64_t interval = 2000;
  if (node.kind == Node::Kind::Scalar) {
    bool enabled = false;
    if (failed(getBool("grad_scaler", node, enabled)))
      return failure();
    if (!enabled)
      return success();
  } else if (failed(forEachEntry(
                 node, "\"grad_scaler\"",
                 {"init_scale", "growth_factor", "backoff_factor",
                  "growth_interval"},
                 [&](StringRef key, const Node &value) -> LogicalResult {
                   if (key == "growth_interval")
                     return getInteger(key, value, interval);
                   return getNumber(key, value,
                                    key == "init_scale"      ? scale
                                    : key == "growth_factor" ? growth
                                                             : backoff);
                 }))) {
    return failure();
  }
  auto op = GradScalerOp::create(builder, node.loc, APFloat(scale),
                                 APFloat(growth), APFloat(backoff), interval);
  return op.verify();
}

void mlir::fsdp::createDefaultOptimizer(OpBuilder &builder, Location loc) {
  OptimizerOp::create(builder, loc, "adamw", builder.getDictionaryAttr({}));
}
