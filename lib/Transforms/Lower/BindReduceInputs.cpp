//===- BindReduceInputs.cpp - gradients straight into the reduction -------===//
#include "fsdp/Dialect/Storages.h"
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/StepProgram.h"
#include "mlir/IR/Remarks.h"
#include "llvm/Support/FormatVariadic.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_BINDREDUCEINPUTS
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;

/// Whether every use of the storage that `owner` allocates, through views, is
/// at or before `end`.
static bool endsBy(Value owner, Operation *end) {
  return llvm::all_of(getWithViews(owner), [&](Value value) {
    return llvm::none_of(value.getUsers(), [&](Operation *user) {
      return end->isBeforeInBlock(user);
    });
  });
}

namespace {
struct BindReduceInputs
    : mlir::fsdp::impl::BindReduceInputsBase<BindReduceInputs> {
  void runOnModule() override {
    ProgramOp program = getProgram(getOperation());
    if (!program)
      return signalPassFailure();
    for (auto reduce : getMicrobatchOps<ReduceScatterOp>(program))
      bind(reduce);
  }

private:
  static void bind(ReduceScatterOp reduce) {
    auto opts = remark::RemarkOpts::name("InPlace").category("fsdp-in-place");
    int64_t bound = 0;
    for (auto [name, grad] :
         llvm::zip(reduce.getParamNames(), reduce.getGrads())) {
      auto param = cast<FlatSymbolRefAttr>(name);
      StringRef obstacle = bind(reduce, param, grad);
      if (obstacle.empty())
        ++bound;
      else if (auto message = remark::missed(reduce.getLoc(), opts))
        message << ("unit " + reduce.getUnit() + ": the gradient of " +
                    param.getValue() +
                    " is copied into the reduction: " + obstacle)
                       .str();
    }
    if (auto message = remark::passed(reduce.getLoc(), opts))
      message << llvm::formatv("unit {0}: {1} of {2} gradients are written "
                               "where the reduction reads them",
                               reduce.getUnit(), bound,
                               reduce.getGrads().size())
                     .str();
  }

  /// Returns what prevents it; nothing if the gradient is bound.
  static StringRef bind(ReduceScatterOp reduce, FlatSymbolRefAttr param,
                        Value grad) {
    Value owner = getStorageOwner(grad);
    auto call = owner.getDefiningOp<aten::CallOp>();
    if (!call)
      return "no operator allocates it";
    if (call.getSchema())
      return "its operator is not ATen's and may allocate in another way";
    if (cast<OpResult>(owner).getResultNumber() != 0)
      return "it is not the first result of its operator";
    if (call.getReduceInputOf())
      return "its storage is also that of another gradient";
    auto type = cast<RankedTensorType>(owner.getType());
    auto gradType = cast<RankedTensorType>(grad.getType());
    if (type.getNumElements() != gradType.getNumElements() ||
        type.getElementType() != gradType.getElementType())
      return "it is only a part of its storage";
    if (!endsBy(owner, reduce))
      return "its storage is used after the reduction";
    call.setReduceInputOfAttr(param);
    return "";
  }
};
} // namespace
