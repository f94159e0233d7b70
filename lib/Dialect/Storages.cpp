//===- Storages.cpp - values that share memory ----------------------------===//
#include "fsdp/Dialect/Storages.h"

#include "mlir/Dialect/Utils/IndexingUtils.h"
#include "llvm/ADT/SetVector.h"
#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::fsdp;

Value mlir::fsdp::getStorageOwner(Value value) {
  // In a program that is not verified yet, views may come round to themselves
  // (Brent's way to notice).
  value = getYielded(value);
  Value mark = value;
  uint64_t steps = 0, limit = 1;
  while (auto call = value.getDefiningOp<aten::CallOp>()) {
    Value viewed =
        call.getViewedOperand(cast<OpResult>(value).getResultNumber());
    if (!viewed)
      break;
    value = getYielded(viewed);
    if (value == mark)
      break;
    if (++steps == limit) {
      mark = value;
      limit *= 2;
    }
  }
  if (isa_and_nonnull<ReloadActivationOp>(getProducer(value)))
    return value.getDefiningOp()->getResult(0);
  return value;
}

SmallVector<Value> mlir::fsdp::getWithViews(ValueRange owners) {
  llvm::SetVector<Value> values;
  values.insert(owners.begin(), owners.end());
  for (size_t next = 0; next < values.size(); ++next)
    for (Operation *user : values[next].getUsers())
      if (auto call = dyn_cast<aten::CallOp>(user))
        for (OpResult result : call->getOpResults())
          if (call.getViewedOperand(result.getResultNumber()) == values[next])
            values.insert(result);
  return values.takeVector();
}

ArrayRef<int64_t> mlir::fsdp::getWrittenOperands(aten::CallOp call) {
  return call.getMutates().value_or(ArrayRef<int64_t>());
}

std::optional<SmallVector<int64_t>> mlir::fsdp::getStrides(Value value) {
  auto type = cast<RankedTensorType>(value.getType());
  if (auto call = value.getDefiningOp<aten::CallOp>()) {
    if (std::optional<ArrayAttr> strides = call.getStrides()) {
      auto list = cast<DenseI64ArrayAttr>(
          (*strides)[cast<OpResult>(value).getResultNumber()]);
      if (!list.empty())
        return llvm::to_vector(list.asArrayRef());
    }
  } else if (auto fused = value.getDefiningOp<FusedOp>()) {
    auto kernel = SymbolTable::lookupNearestSymbolFrom<KernelOp>(
        fused, fused.getKernelAttr());
    if (DenseI64ArrayAttr strides = kernel.getStridesAttr())
      return llvm::to_vector(strides.asArrayRef());
  } else if (!value.getDefiningOp<ReadOp>()) {
    return std::nullopt;
  }
  return computeStrides(type.getShape());
}

bool mlir::fsdp::isRowMajor(Value value) {
  std::optional<SmallVector<int64_t>> strides = getStrides(value);
  return strides &&
         *strides ==
             computeStrides(cast<RankedTensorType>(value.getType()).getShape());
}

int64_t mlir::fsdp::getNumBytes(RankedTensorType type) {
  Type element = type.getElementType();
  auto complex = dyn_cast<ComplexType>(element);
  if (complex)
    element = complex.getElementType();
  int64_t bytes = llvm::divideCeil(element.getIntOrFloatBitWidth(), 8);
  return type.getNumElements() * bytes * (complex ? 2 : 1);
}

Storages::Storages(Block &body) {
  auto add = [&](Value value) {
    Value owner = owners[value] = getStorageOwner(value);
    byOwner[owner].values.push_back(value);
  };
  for (BlockArgument argument : body.getArguments())
    add(argument);
  for (Operation &op : body) {
    for (OpResult result : op.getResults())
      add(result);
    if (auto call = dyn_cast<aten::CallOp>(op))
      for (int64_t operand : getWrittenOperands(call))
        byOwner[getOwner(call.getOperand(operand))].writers.push_back(call);
  }
}

bool Storages::isWrittenFrom(Value owner, Operation *op) const {
  const Storage &storage = get(owner);
  return !storage.writers.empty() &&
         !storage.writers.back()->isBeforeInBlock(op);
}
