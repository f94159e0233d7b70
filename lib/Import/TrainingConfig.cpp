//===- TrainingConfig.cpp - the config's keys about the update ------------===//
#include "TrainingConfig.h"

#include "fsdp/Dialect/FSDP.h"

using namespace mlir;
using namespace mlir::fsdp;
using Node = ConfigNode;

/// What a mapping gives for fsdp.optimizer or fsdp.param_group.
static FailureOr<DictionaryAttr> readHyperparameters(OpBuilder &builder,
                                                     const Node &node) {
  NamedAttrList result;
  for (const auto &[key, value] : node.entries) {
    if (llvm::is_contained({"name", "match", "groups", "options"}, key.scalar))
      continue;
    if (!key.is("betas")) {
      result.append(key.scalar, value.toAttribute(builder.getContext()));
      continue;
    }
    StringRef names[] = {"beta1", "beta2"};
    for (auto [element, name] : llvm::zip_equal(value.elements, names))
      result.append(name, builder.getF64FloatAttr(element.asNumber()));
  }
  // A plug-in's own hyperparameters; the op checks that it is a plug-in.
  if (const Node *options = node.find("options"))
    for (const auto &[key, value] : options->entries) {
      if (llvm::is_contained({"lr", "library"}, key.scalar) ||
          result.get(key.scalar))
        return emitError(key.loc)
               << "key \"" << key.scalar << "\" is given twice";
      result.append(key.scalar, builder.getF64FloatAttr(value.asNumber()));
    }
  return result.getDictionary(builder.getContext());
}

static LogicalResult applyOptimizer(OpBuilder &builder, const Node &node) {
  FailureOr<DictionaryAttr> settings = readHyperparameters(builder, node);
  // The op's invariants are checked at this place in the file.
  if (failed(settings) ||
      failed(OptimizerOp::create(builder, node.loc, node.getText("name"),
                                 *settings)
                 .verify()))
    return failure();
  const Node *groups = node.find("groups");
  if (!groups)
    return success();
  for (const Node &group : groups->elements) {
    const Node *match = group.find("match");
    settings = readHyperparameters(builder, group);
    if (failed(settings) ||
        failed(ParamGroupOp::create(builder, match->loc,
                                    builder.getStrArrayAttr(match->getTexts()),
                                    *settings)
                   .verify()))
      return failure();
  }
  return success();
}

static LogicalResult applySchedule(OpBuilder &builder, const Node &node) {
  StringRef decay = node.getText("decay");
  bool isConstant = decay == "constant";
  for (StringRef key : {"total_steps", "min_lr_ratio"})
    if (isConstant && node.find(key))
      return emitError(node.loc)
             << "expected no \"" << key << "\" with a decay of \"constant\"";
  if (!isConstant && !node.find("total_steps"))
    return emitError(node.loc)
           << "expected a key \"total_steps\" with a decay of \"" << decay
           << "\"";
  int64_t warmup = node.getInteger("warmup_steps");
  int64_t total = isConstant ? warmup + 1 : node.getInteger("total_steps");
  return LRScheduleOp::create(builder, node.loc, warmup, decay, total,
                              APFloat(node.getNumber("min_lr_ratio")))
      .verify();
}

static LogicalResult applyClipping(OpBuilder &builder, const Node &node) {
  return GradientClippingOp::create(builder, node.loc,
                                    APFloat(node.getNumber("max_norm")),
                                    APFloat(node.getNumber("norm_type")))
      .verify();
}

static LogicalResult applyScaler(OpBuilder &builder, const Node &node) {
  if (node.is("false"))
    return success();
  return GradScalerOp::create(builder, node.loc,
                              APFloat(node.getNumber("init_scale")),
                              APFloat(node.getNumber("growth_factor")),
                              APFloat(node.getNumber("backoff_factor")),
                              node.getInteger("growth_interval"))
      .verify();
}

static LogicalResult applyInexact(OpBuilder &builder, const Node &node) {
  const Node *chunks = node.find("loss_chunks");
  if (!chunks || chunks->asInteger() == 1)
    return success();
  return ChunkedLossOp::create(builder, chunks->loc, chunks->asInteger())
      .verify();
}

static LogicalResult applyAccumulation(OpBuilder &builder, const Node &config) {
  const Node *steps = config.find("gradient_accumulation_steps");
  if (!steps)
    return success();
  bool reduce = config.getBool("reduce_each_microbatch");
  const Node *allReduce = config.find("all_reduce_each_microbatch");
  if (allReduce && allReduce->asBool() && !reduce)
    return emitError(allReduce->loc)
           << "expected no \"all_reduce_each_microbatch\" of microbatches that "
              "are not reduced, got: true";
  return AccumulationOp::create(builder, steps->loc, steps->asInteger(), reduce,
                                config.getBool("reshard_after_backward"),
                                config.getBool("all_reduce_each_microbatch"))
      .verify();
}

LogicalResult mlir::fsdp::applyTraining(OpBuilder &builder,
                                        const ConfigNode &config) {
  if (!config.find("optimizer"))
    createDefaultOptimizer(builder, config.loc);
  std::pair<StringRef, LogicalResult (*)(OpBuilder &, const Node &)> keys[] = {
      {"optimizer", applyOptimizer},
      {"lr_schedule", applySchedule},
      {"clip_grad_norm", applyClipping},
      {"grad_scaler", applyScaler},
      {"inexact", applyInexact}};
  for (auto [key, apply] : keys)
    if (const Node *node = config.find(key);
        node && failed(apply(builder, *node)))
      return failure();
  return applyAccumulation(builder, config);
}

void mlir::fsdp::createDefaultOptimizer(OpBuilder &builder, Location loc) {
  OptimizerOp::create(
      builder, loc,
      getPolicySchema().find("optimizer")->find("name")->initial.value(),
      builder.getDictionaryAttr({}));
}
