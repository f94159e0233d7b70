//===- KernelOps.cpp - calls that run as one ------------------------------===//
#include "SymbolChecks.h"
#include "fsdp/Dialect/Aten.h"
#include "fsdp/Plan/Tensors.h"

using namespace mlir;
using namespace mlir::fsdp;

KernelReturnOp KernelOp::getReturn() {
  return cast<KernelReturnOp>(getBody().front().getTerminator());
}

LogicalResult KernelOp::verifyRegions() {
  for (Operation &op : getBody().front().without_terminator()) {
    auto call = dyn_cast<aten::CallOp>(op);
    bool aliases =
        call && llvm::any_of(call.getViews().value_or(ArrayRef<int64_t>()),
                             [](int64_t operand) { return operand != -1; });
    bool writes = call && call.getMutates() && !call.getMutates()->empty();
    if (!call || aliases || writes || call.getRandom())
      return op.emitOpError("Kernel-1: expected in a kernel an aten.call that "
                            "writes no operand, aliases none and draws no "
                            "random numbers");
  }
  auto results = getReturn().getResults();
  if (results.empty() || llvm::any_of(results, [&](Value result) {
        return cast<RankedTensorType>(result.getType()).getShape() !=
               cast<RankedTensorType>(results.front().getType()).getShape();
      }))
    return emitOpError("Kernel-1: expected results of one shape, got: ")
           << results.getTypes();
  auto domain = cast<RankedTensorType>(results.front().getType());
  if (DenseI64ArrayAttr layout = getStridesAttr())
    if (layout.size() != domain.getRank() ||
        !::fsdp::plan::areDense(domain.getShape().vec(),
                                layout.asArrayRef().vec()) ||
        llvm::is_contained(layout.asArrayRef(), 0))
      return emitOpError("Kernel-1: expected strides of dense results, got: ")
             << layout;
  ArrayAttr strides = getOperandStridesAttr();
  if (!strides)
    return success();
  Block::BlockArgListType operands = getBody().front().getArguments();
  if (strides.size() != operands.size())
    return emitOpError("Kernel-1: expected strides for each of the ")
           << operands.size() << " operands, got: " << strides.size();
  for (auto [attr, operand] : llvm::zip(strides, operands)) {
    auto array = dyn_cast<DenseI64ArrayAttr>(attr);
    auto type = dyn_cast<RankedTensorType>(operand.getType());
    if (!array || !type || (!array.empty() && array.size() != type.getRank()) ||
        llvm::any_of(array.asArrayRef(), [](int64_t s) { return s < 0; }))
      return emitOpError("Kernel-1: expected no strides of an operand, or one "
                         "for each of its dimensions, got: ")
             << attr;
  }
  return success();
}

LogicalResult FusedOp::verifySymbolUses(SymbolTableCollection &symbols) {
  auto kernel = lookup<KernelOp>(symbols, *this, getKernelAttr(), "Fused-1");
  if (!kernel)
    return failure();
  if (kernel.getBody().front().getArgumentTypes() != getOperands().getTypes() ||
      kernel.getReturn().getResults().getTypes() != getResultTypes())
    return emitOpError("Fused-1: expected the types of ")
           << getKernelAttr() << ", (" << kernel.getBody().getArgumentTypes()
           << ") -> (" << kernel.getReturn().getResults().getTypes() << ")";
  return success();
}
