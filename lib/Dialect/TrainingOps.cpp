//===- TrainingOps.cpp - verifiers of what happens to gradients -----------===//
#include "SymbolChecks.h"
#include "fsdp/Plan/Limits.h"

#include "llvm/ADT/STLExtras.h"
#include "llvm/ADT/StringMap.h"

#include <cmath>

using namespace mlir;
using namespace mlir::fsdp;

//===----------------------------------------------------------------------===//
// OptimizerOp, ParamGroupOp
//===----------------------------------------------------------------------===//

namespace {
enum class Kind { Number, NonNegative, UnitInterval, Flag, Text };
} // namespace

/// The hyperparameters of an optimizer by name; null for an unknown one. A
/// plug-in has any further numbers, one outside of the plan has none.
static const llvm::StringMap<Kind> *getHyperparameterKinds(StringRef name) {
  static const llvm::StringMap<Kind> adam = {
      {"lr", Kind::NonNegative},     {"beta1", Kind::UnitInterval},
      {"beta2", Kind::UnitInterval}, {"eps", Kind::NonNegative},
      {"amsgrad", Kind::Flag},       {"weight_decay", Kind::NonNegative},
      {"maximize", Kind::Flag},      {"fused", Kind::Flag},
      {"foreach", Kind::Flag}};
  static const llvm::StringMap<Kind> sgd = {
      {"lr", Kind::NonNegative},   {"momentum", Kind::NonNegative},
      {"dampening", Kind::Number}, {"weight_decay", Kind::NonNegative},
      {"nesterov", Kind::Flag},    {"maximize", Kind::Flag},
      {"fused", Kind::Flag},       {"foreach", Kind::Flag}};
  static const llvm::StringMap<Kind> plugin = {{"lr", Kind::NonNegative},
                                               {"library", Kind::Text}};
  static const llvm::StringMap<Kind> external;
  if (name == "adam" || name == "adamw")
    return &adam;
  if (name == "sgd")
    return &sgd;
  if (name == "external")
    return &external;
  return name == "plugin" ? &plugin : nullptr;
}

static LogicalResult verifyHyperparameters(Operation *op, StringRef optimizer,
                                           DictionaryAttr given,
                                           StringRef label) {
  const auto &known = *getHyperparameterKinds(optimizer);
  for (NamedAttribute entry : given) {
    auto it = known.find(entry.getName());
    Kind kind = Kind::Number;
    if (it != known.end())
      kind = it->second;
    else if (optimizer != "plugin")
      return op->emitOpError(label)
             << ": \"" << optimizer << "\" has no hyperparameter "
             << entry.getName();
    if (kind == Kind::Text) {
      if (!isa<StringAttr>(entry.getValue()))
        return op->emitOpError(label)
               << ": expected a string for " << entry.getName()
               << ", got: " << entry.getValue();
      continue;
    }
    if (kind == Kind::Flag) {
      if (!isa<BoolAttr>(entry.getValue()))
        return op->emitOpError(label)
               << ": expected true or false for " << entry.getName()
               << ", got: " << entry.getValue();
      continue;
    }
    auto number = dyn_cast<FloatAttr>(entry.getValue());
    if (!number || !number.getType().isF64())
      return op->emitOpError(label)
             << ": expected an f64 for " << entry.getName()
             << ", got: " << entry.getValue();
    double value = number.getValueAsDouble();
    bool inRange = kind == Kind::Number || value >= 0.0;
    if (kind == Kind::UnitInterval)
      inRange = value >= 0.0 && value < 1.0;
    if (!std::isfinite(value) || !inRange)
      return op->emitOpError(label) << ": " << entry.getName()
                                    << " is out of range: " << entry.getValue();
  }
  return success();
}

static bool hasFlag(DictionaryAttr given, StringRef name) {
  auto attr = given.getAs<BoolAttr>(name);
  return attr && attr.getValue();
}

LogicalResult OptimizerOp::verify() {
  if (!getHyperparameterKinds(getName()))
    return emitOpError("Optimizer-1: expected \"adam\", \"adamw\", \"sgd\", "
                       "\"plugin\" or \"external\", got: \"")
           << getName() << '"';
  DictionaryAttr given = getHyperparameters();
  if (failed(verifyHyperparameters(*this, getName(), given, "Optimizer-1")))
    return failure();
  if (getName() == "plugin" && !given.contains("library"))
    return emitOpError("Optimizer-1: expected a \"library\" for \"plugin\", "
                       "got none");
  if (hasFlag(given, "fused") && hasFlag(given, "foreach"))
    return emitOpError("Optimizer-2: expected at most one of \"fused\" and "
                       "\"foreach\", got both");
  auto number = [&](StringRef name) {
    auto attr = given.getAs<FloatAttr>(name);
    return attr ? attr.getValueAsDouble() : 0.0;
  };
  if (hasFlag(given, "nesterov") &&
      (number("momentum") <= 0 || number("dampening") != 0))
    return emitOpError("Optimizer-2: expected a \"momentum\" and no "
                       "\"dampening\" with \"nesterov\"");
  return success();
}

LogicalResult ParamGroupOp::verify() {
  if (getPatterns().empty())
    return emitOpError("ParamGroup-2: expected at least one pattern, got none");
  auto module = (*this)->getParentOfType<ModuleOp>();
  if (!module)
    return success();
  for (auto optimizer : module.getOps<OptimizerOp>()) {
    // An unknown optimizer is an error of its own.
    if (!getHyperparameterKinds(optimizer.getName()))
      return success();
    for (NamedAttribute entry : getHyperparameters())
      if (llvm::is_contained({"fused", "foreach", "library"},
                             entry.getName().getValue()))
        return emitOpError("ParamGroup-1: ")
               << entry.getName() << " holds for all groups: expected it in "
               << "the optimizer";
    return verifyHyperparameters(*this, optimizer.getName(),
                                 getHyperparameters(), "ParamGroup-1");
  }
  return success();
}

//===----------------------------------------------------------------------===//
// GradientClippingOp, LRScheduleOp, AccumulationOp, ChunkedLossOp,
// GradScalerOp
//===----------------------------------------------------------------------===//

template <typename OpT>
static LogicalResult verifySingle(OpT op, StringRef label) {
  auto module = op->template getParentOfType<ModuleOp>();
  if (module && *module.template getOps<OpT>().begin() != op)
    return op.emitOpError(label) << ": expected at most one in the module";
  return success();
}

LogicalResult GradientClippingOp::verify() {
  double maxNorm = getMaxNorm().convertToDouble();
  if (!std::isfinite(maxNorm) || maxNorm <= 0)
    return emitOpError(
               "GradientClipping-1: expected a positive max_norm, got: ")
           << getMaxNormAttr();
  double normType = getNormType().convertToDouble();
  if (normType != 1.0 && normType != 2.0 && normType != INFINITY)
    return emitOpError("GradientClipping-1: expected a norm_type of 1, 2 or "
                       "inf, got: ")
           << getNormTypeAttr();
  return verifySingle(*this, "GradientClipping-2");
}

LogicalResult LRScheduleOp::verify() {
  if (!llvm::is_contained({"cosine", "linear", "constant"}, getDecay()))
    return emitOpError("LRSchedule-1: expected a decay \"cosine\", \"linear\" "
                       "or \"constant\", got: ")
           << getDecayAttr();
  int64_t warmup = getWarmupSteps(), total = getTotalSteps();
  if (warmup < 0 || warmup >= total)
    return emitOpError("LRSchedule-1: expected 0 <= warmup_steps < "
                       "total_steps, got: ")
           << warmup << " and " << total;
  double ratio = getMinLrRatio().convertToDouble();
  if (!(ratio >= 0 && ratio <= 1))
    return emitOpError("LRSchedule-1: expected a min_lr_ratio in [0, 1], got: ")
           << getMinLrRatioAttr();
  return verifySingle(*this, "LRSchedule-2");
}

LogicalResult AccumulationOp::verify() {
  auto steps = static_cast<int64_t>(getSteps());
  if (steps < 1 || steps > ::fsdp::plan::kMaxAccumulationSteps)
    return emitOpError("Accumulation-1: expected steps in [1, ")
           << ::fsdp::plan::kMaxAccumulationSteps << "], got: " << steps;
  return verifySingle(*this, "Accumulation-2");
}

LogicalResult ChunkedLossOp::verify() {
  auto chunks = static_cast<int64_t>(getChunks());
  if (chunks < 2)
    return emitOpError("ChunkedLoss-1: expected 2 chunks at least, got: ")
           << chunks;
  return verifySingle(*this, "ChunkedLoss-2");
}

LogicalResult GradScalerOp::verify() {
  auto check = [&](APFloat given, bool holds, StringRef expected) {
    if (given.isFinite() && holds)
      return success();
    SmallString<16> text;
    given.toString(text);
    return LogicalResult(emitOpError("GradScaler-1: expected ")
                         << expected << ", got: " << text);
  };
  double scale = getInitScale().convertToDouble();
  double growth = getGrowthFactor().convertToDouble();
  double backoff = getBackoffFactor().convertToDouble();
  if (failed(check(getInitScale(), scale > 0, "a positive init_scale")) ||
      failed(check(getGrowthFactor(), growth > 1, "a growth_factor above 1")) ||
      failed(check(getBackoffFactor(), backoff > 0 && backoff < 1,
                   "a backoff_factor between 0 and 1")))
    return failure();
  if (static_cast<int64_t>(getGrowthInterval()) < 1)
    return emitOpError(
               "GradScaler-1: expected a positive growth_interval, got: ")
           << static_cast<int64_t>(getGrowthInterval());
  return verifySingle(*this, "GradScaler-2");
}

//===----------------------------------------------------------------------===//
// LossScaleOp, UnscaleOp, ClipGradNormOp
//===----------------------------------------------------------------------===//

bool mlir::fsdp::reducesInParamDType(Operation *op) {
  auto module = op->getParentOfType<ModuleOp>();
  auto from = module
                  ? module->getAttrOfType<DictionaryAttr>(capturedForAttrName)
                  : nullptr;
  auto version = from ? from.getAs<StringAttr>("torch") : nullptr;
  if (!version)
    return true;
  auto [major, rest] = version.getValue().split('.');
  unsigned parts[2] = {};
  if (major.getAsInteger(10, parts[0]) ||
      rest.split('.').first.getAsInteger(10, parts[1]))
    return true;
  return std::pair(parts[0], parts[1]) >= std::pair(2u, 15u);
}

RankedTensorType mlir::fsdp::getAccumulatedType(ParamOp param, UnitOp unit) {
  RankedTensorType type = reducesInParamDType(param)
                              ? param.getTensorType()
                              : cast<RankedTensorType>(param.getGradType());
  MixedPrecisionAttr policy = unit ? unit.getMixedPrecisionAttr() : nullptr;
  return policy && policy.getReduceDtype() ? type.clone(policy.getReduceDtype())
                                           : type;
}

/// Checks operands and results against their parameters: they are shards.
static LogicalResult verifyGradTypes(SymbolTableCollection &symbols,
                                     Operation *op, ArrayAttr names,
                                     StringRef label) {
  if (names.size() != op->getNumOperands() ||
      names.size() != op->getNumResults())
    return op->emitOpError(label)
           << ": expected " << names.size()
           << " operands and results, got: " << op->getNumOperands() << " and "
           << op->getNumResults();
  for (auto [nameAttr, grad, result] :
       llvm::zip(names, op->getOperands(), op->getResultTypes())) {
    auto name = cast<FlatSymbolRefAttr>(nameAttr);
    auto param = symbols.lookupNearestSymbolFrom<ParamOp>(op, name);
    if (!param)
      return op->emitOpError(label)
             << ": expected " << name << " to name an fsdp.param, found none";
    Type sharded = param.getShardedType();
    if (!sharded || grad.getType() != sharded || result != sharded) {
      InFlightDiagnostic diag = op->emitOpError(label) << ": expected ";
      if (sharded)
        diag << sharded;
      else
        diag << "a sharding";
      return diag << " for " << name << ", got: " << grad.getType() << " to "
                  << result;
    }
  }
  return success();
}

LogicalResult LossScaleOp::verify() {
  auto type = cast<RankedTensorType>(getScale().getType());
  if (type.getRank() != 0 || !type.getElementType().isF32())
    return emitOpError("LossScale-1: expected a tensor<f32>, got: ") << type;
  return success();
}

LogicalResult UnscaleOp::verifySymbolUses(SymbolTableCollection &symbols) {
  if (failed(verifyGradTypes(symbols, *this, getParamNames(), "Unscale-1")))
    return failure();
  for (auto [name, grad] : llvm::zip(getParamNames(), getGrads())) {
    auto type = cast<ShardedType>(grad.getType()).getTensor();
    if (type.getElementType().isF16())
      return emitOpError("Unscale-1: expected no gradient in f16 (GradScaler "
                         "divides none), got that of ")
             << name;
  }
  return success();
}

LogicalResult ClipGradNormOp::verifySymbolUses(SymbolTableCollection &symbols) {
  return verifyGradTypes(symbols, *this, getParamNames(), "ClipGradNorm-1");
}
