//===- InsertClipping.cpp - clip the gradients before the update ----------===//
//
// The order of the norms in the all-reduced vector decides the last bits of
// their norm, so it is that of model.parameters(). The module has parameters
// children first.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/StepGradients.h"
#include "fsdp/Transforms/StepProgram.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_INSERTCLIPPING
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;

namespace {
struct InsertClipping : mlir::fsdp::impl::InsertClippingBase<InsertClipping> {
  void runOnModule() override {
    ModuleOp module = getOperation();
    auto policies = module.getOps<GradientClippingOp>();
    if (policies.empty())
      return;
    GradientClippingOp policy = *policies.begin();
    ProgramOp program = getProgram(module);
    if (!program)
      return signalPassFailure();
    for (auto param : module.getOps<ParamOp>())
      if (param.getIgnored() && !param.getFrozen()) {
        policy.emitOpError("expected no ignored parameter in a model whose "
                           "gradients are clipped, got: ")
            << param.getSymNameAttr();
        return signalPassFailure();
      }
    auto order = llvm::to_vector(module.getOps<ParamOp>());
    llvm::stable_sort(order, [](ParamOp a, ParamOp b) {
      return a.getPosition().value_or(0) < b.getPosition().value_or(0);
    });
    StepGradients shards(program, order, isShard);
    if (shards.empty()) {
      policy.emitOpError("expected the program to have gradient shards, "
                         "found none");
      return signalPassFailure();
    }
    OpBuilder builder = getOptimizerPhaseBuilder(program, policy.getLoc());
    auto clip = ClipGradNormOp::create(
        builder, policy.getLoc(), shards.getTypes(), shards.getNames(),
        shards.getValues(), policy.getMaxNormAttr(), policy.getNormTypeAttr());
    shards.replaceWith(clip.getClipped());
    policy.erase();
  }
};
} // namespace
