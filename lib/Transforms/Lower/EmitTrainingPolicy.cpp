//===- EmitTrainingPolicy.cpp - the policy about the update in a plan -----===//
#include "EmitTrainingPolicy.h"

using namespace mlir;
using namespace mlir::fsdp;
namespace plan = ::fsdp::plan;

/// torch.optim's defaults for what is not given.
static plan::Optimizer getOptimizer(StringRef name, DictionaryAttr given) {
  plan::Optimizer optimizer;
  optimizer.name = name.str();
  auto number = [&](StringRef name, double otherwise) {
    auto attr = given.getAs<FloatAttr>(name);
    return attr ? attr.getValueAsDouble() : otherwise;
  };
  auto flag = [&](StringRef name) {
    auto attr = given.getAs<BoolAttr>(name);
    return attr && attr.getValue();
  };
  optimizer.lr = number("lr", 1e-3);
  if (name == "plugin") {
    optimizer.library = given.getAs<StringAttr>("library").str();
    for (NamedAttribute entry : given)
      if (auto option = dyn_cast<FloatAttr>(entry.getValue());
          option && entry.getName() != "lr")
        optimizer.options[entry.getName().str()] = option.getValueAsDouble();
    return optimizer;
  }
  optimizer.beta1 = number("beta1", 0.9);
  optimizer.beta2 = number("beta2", 0.999);
  optimizer.eps = number("eps", 1e-8);
  optimizer.weightDecay = number("weight_decay", name == "adamw" ? 1e-2 : 0.0);
  optimizer.momentum = number("momentum", 0.0);
  optimizer.dampening = number("dampening", 0.0);
  optimizer.nesterov = flag("nesterov");
  optimizer.amsgrad = flag("amsgrad");
  optimizer.maximize = flag("maximize");
  optimizer.fused = flag("fused");
  optimizer.foreach = flag("foreach");
  return optimizer;
}

void mlir::fsdp::emitTrainingPolicy(ModuleOp module, plan::Plan &result) {
  for (auto op : module.getOps<OptimizerOp>()) {
    result.optimizer = getOptimizer(op.getName(), op.getHyperparameters());
    for (auto group : module.getOps<ParamGroupOp>()) {
      NamedAttrList merged(op.getHyperparameters());
      for (NamedAttribute entry : group.getHyperparameters())
        merged.set(entry.getName(), entry.getValue());
      result.paramGroups.push_back(getOptimizer(
          op.getName(), merged.getDictionary(module.getContext())));
    }
  }
  for (auto op : module.getOps<LRScheduleOp>())
    result.lrSchedule = plan::LRSchedule{
        static_cast<int64_t>(op.getWarmupSteps()), op.getDecay().str(),
        static_cast<int64_t>(op.getTotalSteps()),
        op.getMinLrRatio().convertToDouble()};
  for (auto op : module.getOps<GradScalerOp>())
    result.gradScaler =
        plan::GradScaler{op.getInitScale().convertToDouble(),
                         op.getGrowthFactor().convertToDouble(),
                         op.getBackoffFactor().convertToDouble(),
                         static_cast<int64_t>(op.getGrowthInterval())};
}
