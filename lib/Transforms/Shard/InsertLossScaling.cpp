//===- InsertLossScaling.cpp - scale the loss, unscale its gradients ------===//
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/StepGradients.h"
#include "fsdp/Transforms/StepProgram.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_INSERTLOSSSCALING
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;

namespace {
struct InsertLossScaling
    : mlir::fsdp::impl::InsertLossScalingBase<InsertLossScaling> {
  void runOnModule() override {
    ModuleOp module = getOperation();
    auto policies = module.getOps<GradScalerOp>();
    if (policies.empty())
      return;
    GradScalerOp policy = *policies.begin();
    ProgramOp program = getProgram(module);
    if (!program || failed(scaleLoss(program)) ||
        failed(unscale(module, program, policy)))
      signalPassFailure();
  }

private:
  /// `scale(loss).backward()`: autograd multiplies the 1 that it begins with,
  /// and casts the product to the loss's dtype.
  static LogicalResult scaleLoss(ProgramOp program) {
    aten::CallOp one = getBackwardSeed(program, "loss scaling replaces it");
    if (!one)
      return failure();
    OpBuilder builder(one);
    auto type = cast<RankedTensorType>(one.getResult(0).getType());
    Value seed = createFor<LossScaleOp>(
        one, builder, RankedTensorType::get({}, builder.getF32Type()));
    if (!type.getElementType().isF32()) {
      // mul(scale, ones_like(loss)) would be of the wider dtype.
      builder.setInsertionPointAfter(one);
      auto cast = createFor<aten::CallOp>(
          one, builder, type, "aten::copy",
          ArrayRef<OpFoldResult>{one.getResult(0), seed,
                                 builder.getBoolAttr(false)});
      one.getResult(0).replaceAllUsesExcept(cast.getResult(0), cast);
      return success();
    }
    one.getResult(0).replaceAllUsesWith(seed);
    one.erase();
    return success();
  }

  static LogicalResult unscale(ModuleOp module, ProgramOp program,
                               GradScalerOp policy) {
    for (auto param : module.getOps<ParamOp>())
      if (param.getIgnored() && !param.getFrozen())
        return policy.emitOpError("expected no ignored parameter in a model "
                                  "whose gradients are scaled, got: ")
               << param.getSymNameAttr();
    StepGradients shards(program, isShard);
    if (shards.empty())
      return policy.emitOpError("expected the program to have gradient shards, "
                                "found none");
    OpBuilder builder = getOptimizerPhaseBuilder(program, policy.getLoc());
    auto unscale = UnscaleOp::create(builder, policy.getLoc(),
                                     shards.getTypes(), shards.getNames(),
                                     shards.getValues(), isDeferred(module));
    shards.replaceWith(unscale.getUnscaled());
    return success();
  }

  /// Whether GradScaler.step hands the scale to the optimizer: a fused one does
  /// the division itself, unless clipping needs it before.
  static bool isDeferred(ModuleOp module) {
    if (!module.getOps<GradientClippingOp>().empty())
      return false;
    for (auto optimizer : module.getOps<OptimizerOp>()) {
      auto fused = optimizer.getHyperparameters().getAs<BoolAttr>("fused");
      return fused && fused.getValue();
    }
    return false;
  }
};
} // namespace
