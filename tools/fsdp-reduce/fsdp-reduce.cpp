//===- fsdp-reduce.cpp - the smallest program that still shows a fault ----===//
//
// As mlir-reduce, with this project's dialects and passes: leaves out what a
// test, a script that is given a file, does not need to fail.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Support/Outputs.h"
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/StepProgram.h"
#include "mlir/IR/PatternMatch.h"
#include "mlir/IR/TypeUtilities.h"
#include "mlir/Reducer/ReductionPatternInterface.h"
#include "mlir/Tools/mlir-reduce/MlirReduceMain.h"

using namespace mlir;

namespace {
/// PyTorch's number of an element type.
std::optional<int64_t> getScalarType(Type type) {
  auto integer = dyn_cast<IntegerType>(type);
  if (type.isF16())
    return 5;
  if (type.isF32())
    return 6;
  if (type.isF64())
    return 7;
  if (type.isBF16())
    return 15;
  if (!integer || !integer.isSignless())
    return std::nullopt;
  switch (integer.getWidth()) {
  case 1:
    return 11;
  case 32:
    return 3;
  case 64:
    return 4;
  default:
    return std::nullopt;
  }
}

/// A call that computes something becomes one of aten::zeros, which needs
/// nothing of what was before it.
struct ReplaceByZeros : OpRewritePattern<aten::CallOp> {
  using OpRewritePattern::OpRewritePattern;

  LogicalResult matchAndRewrite(aten::CallOp call,
                                PatternRewriter &rewriter) const override {
    if (call.getOperands().empty() || call.getNumResults() == 0 ||
        !llvm::all_of(call.getResults(), [](Value result) {
          return getScalarType(getElementTypeOrSelf(result)).has_value();
        }))
      return failure();
    SmallVector<Value> zeros;
    for (Value result : call.getResults()) {
      auto type = cast<RankedTensorType>(result.getType());
      Attribute none = aten::NoneAttr::get(getContext());
      Attribute dtype =
          rewriter.getI64IntegerAttr(*getScalarType(type.getElementType()));
      Attribute shape = rewriter.getI64ArrayAttr(type.getShape());
      auto made = mlir::fsdp::createFor<aten::CallOp>(
          call, rewriter, type, "aten::zeros", ValueRange(),
          rewriter.getArrayAttr({shape, dtype, none, none, none}),
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
  ::fsdp::reserveStandardStreams();
  mlir::fsdp::registerFSDPPasses();
  mlir::fsdp::registerPipelines();
  DialectRegistry registry;
  registry.insert<mlir::fsdp::FSDPDialect, aten::AtenDialect>();
  registry.addExtension(+[](MLIRContext *, aten::AtenDialect *dialect) {
    dialect->addInterfaces<AtenReduction>();
  });
  MLIRContext context(registry);
  return failed(mlirReduceMain(argc, argv, context));
}
