//===- InsertClipping.cpp - clip the gradients before the update ----------===//
//
// The order of the norms in the all-reduced vector decides the last bits of
// their norm, so it is that of model.parameters(): named_modules() visits a
// module before its children, and yields its own parameters there. The module
// has parameters children first, so a module's parameters are one run that
// ends with its own.
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

/// Appends `params`, which all lie in the module whose dotted name has
/// `prefixSize` characters (the last dot included), in the order of
/// parameters().
static void appendPreOrder(ArrayRef<ParamOp> params, size_t prefixSize,
                           SmallVectorImpl<ParamOp> &order) {
  auto getChild = [&](ParamOp param) {
    StringRef rest = param.getSymName().drop_front(prefixSize);
    return rest.contains('.') ? rest.take_until([](char c) { return c == '.'; })
                              : StringRef();
  };
  for (ParamOp param : params)
    if (getChild(param).empty())
      order.push_back(param);
  for (size_t begin = 0; begin < params.size();) {
    StringRef child = getChild(params[begin]);
    size_t end = begin + 1;
    while (end < params.size() && getChild(params[end]) == child)
      ++end;
    if (!child.empty())
      appendPreOrder(params.slice(begin, end - begin),
                     prefixSize + child.size() + 1, order);
    begin = end;
  }
}

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
    SmallVector<ParamOp> order;
    appendPreOrder(llvm::to_vector(module.getOps<ParamOp>()), 0, order);
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
