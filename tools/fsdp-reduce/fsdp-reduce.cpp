//===- fsdp-reduce.cpp - the smallest program that still shows a fault ----===//
//
// As mlir-reduce, with this project's dialects and passes: leaves out what a
// test, a script that is given a file, does not need to fail.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Transforms/Passes.h"
#include "mlir/IR/PatternMatch.h"
#include "mlir/Reducer/ReductionPatternInterface.h"
#include "mlir/Tools/mlir-reduce/MlirReduceMain.h"

using namespace mlir;

namespace {
/// A call that computes something becomes one of aten::zeros, which needs
/// nothing of what was before it.
struct ReplaceByZeros : OpRewritePattern<aten::CallOp> {
  using OpRewritePattern::OpRewritePattern;

  LogicalResult matchAndRewrite(aten::CallOp call,
                                PatternRewriter &rewriter) const override {
    if (call.getOperands().empty() || call.getNumResults() == 0)
      return failure();
    SmallVector<Value> zeros;
    for (Value result : call.getResults()) {
      auto type = cast<RankedTensorType>(result.getType());
      Attribute none = aten::NoneAttr::get(getContext());
      Attribute shape = rewriter.getI64ArrayAttr(type.getShape());
      auto made = aten::CallOp::create(
          rewriter, call.getLoc(), type, "aten::zeros", ValueRange(),
          rewriter.getArrayAttr({shape, none, none, none, none}),
          /*views=*/nullptr, /*mutates=*/nullptr, /*random=*/false,
          /*reduce_input_of=*/nullptr, /*recompute=*/false,
          /*strides=*/nullptr, /*schema=*/nullptr);
      zeros.push_back(made.getResult(0));
    }
    rewriter.replaceOp(call, zeros);
    return success();
  }
};

struct AtenReduction : DialectReductionPatternInterface {
  explicit AtenReduction(Dialect *dialect)
      : DialectReductionPatternInterface(dialect) {}

  void populateReductionPatterns(RewritePatternSet &patterns) const override {
    patterns.add<ReplaceByZeros>(patterns.getContext());
  }
};
} // namespace

int main(int argc, char **argv) {
  fsdp::registerFSDPPasses();
  fsdp::registerPipelines();
  DialectRegistry registry;
  registry.insert<fsdp::FSDPDialect, aten::AtenDialect>();
  registry.addExtension(+[](MLIRContext *, aten::AtenDialect *dialect) {
    dialect->addInterfaces<AtenReduction>();
  });
  MLIRContext context(registry);
  return failed(mlirReduceMain(argc, argv, context));
}
