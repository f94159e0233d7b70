//===- Storages.h - values that share memory ------------------------------===//
#ifndef FSDP_LIB_TRANSFORMS_SHARD_STORAGES_H
#define FSDP_LIB_TRANSFORMS_SHARD_STORAGES_H

#include "fsdp/Dialect/Aten.h"
#include "fsdp/Dialect/FSDP.h"

#include "llvm/ADT/DenseMap.h"
#include "llvm/Support/MathExtras.h"

namespace mlir::fsdp {

/// The operands that a call writes in place.
inline ArrayRef<int64_t> getWrittenOperands(aten::CallOp call) {
  return call.getMutates().value_or(ArrayRef<int64_t>());
}

inline int64_t getNumBytes(Value value) {
  auto type = cast<RankedTensorType>(value.getType());
  Type element = type.getElementType();
  auto complex = dyn_cast<ComplexType>(element);
  if (complex)
    element = complex.getElementType();
  int64_t bytes = llvm::divideCeil(element.getIntOrFloatBitWidth(), 8);
  return type.getNumElements() * bytes * (complex ? 2 : 1);
}

/// Values that share memory, and the calls that write it after its allocation,
/// both in program order.
struct Storage {
  SmallVector<Value> values;
  SmallVector<aten::CallOp> writers;
};

/// Aliasing of a whole program, by the value that owns the memory.
class Storages {
public:
  explicit Storages(Block &body) {
    for (BlockArgument argument : body.getArguments())
      add(argument, argument);
    for (Operation &op : body) {
      auto call = dyn_cast<aten::CallOp>(op);
      for (OpResult result : op.getResults()) {
        Value viewed =
            call ? call.getViewedOperand(result.getResultNumber()) : Value();
        add(result, viewed ? getOwner(viewed) : Value(result));
      }
      if (call)
        for (int64_t operand : getWrittenOperands(call))
          byOwner[getOwner(call.getOperand(operand))].writers.push_back(call);
    }
  }

  Value getOwner(Value value) const { return owners.lookup(value); }
  const Storage &get(Value owner) const { return byOwner.find(owner)->second; }

  /// Whether `op`, or a call after it, writes the storage.
  bool isWrittenFrom(Value owner, Operation *op) const {
    const Storage &storage = get(owner);
    return !storage.writers.empty() &&
           !storage.writers.back()->isBeforeInBlock(op);
  }

private:
  void add(Value value, Value owner) {
    owners[value] = owner;
    byOwner[owner].values.push_back(value);
  }

  llvm::DenseMap<Value, Value> owners;
  llvm::DenseMap<Value, Storage> byOwner;
};

} // namespace mlir::fsdp

#endif // FSDP_LIB_TRANSFORMS_SHARD_STORAGES_H
