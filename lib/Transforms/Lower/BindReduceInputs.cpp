//===- BindReduceInputs.cpp - gradients straight into the reduction -------===//
#include "fsdp/Transforms/Passes.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_BINDREDUCEINPUTS
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;

/// Whether every use of the storage that `owner` allocates, through views, is
/// at or before `end`.
static bool endsBy(Value owner, Operation *end) {
  SmallVector<Value> values{owner};
  while (!values.empty()) {
    Value value = values.pop_back_val();
    for (Operation *user : value.getUsers()) {
      if (end->isBeforeInBlock(user))
        return false;
      auto call = dyn_cast<aten::CallOp>(user);
      if (!call)
        continue;
      for (OpResult result : call->getOpResults())
        if (call.getViewedOperand(result.getResultNumber()) == value)
          values.push_back(result);
    }
  }
  return true;
}

namespace {
struct BindReduceInputs
    : mlir::fsdp::impl::BindReduceInputsBase<BindReduceInputs> {
  void runOnOperation() override {
    ProgramOp program = getProgram(getOperation());
    if (!program)
      return signalPassFailure();
    for (auto reduce : program.getOps<ReduceScatterOp>())
      for (auto [name, grad] :
           llvm::zip(reduce.getParamNames(), reduce.getGrads()))
        bind(reduce, cast<FlatSymbolRefAttr>(name), grad);
  }

private:
  static void bind(ReduceScatterOp reduce, FlatSymbolRefAttr param,
                   Value grad) {
    Value owner = getStorageOwner(grad);
    auto call = owner.getDefiningOp<aten::CallOp>();
    if (!call || cast<OpResult>(owner).getResultNumber() != 0 ||
        call.getReduceInputOf())
      return;
    auto type = cast<RankedTensorType>(owner.getType());
    auto gradType = cast<RankedTensorType>(grad.getType());
    if (type.getNumElements() != gradType.getNumElements() ||
        type.getElementType() != gradType.getElementType() ||
        !endsBy(owner, reduce))
      return;
    call.setReduceInputOfAttr(param);
  }
};
} // namespace
