//===- Storages.h - values that share memory ------------------------------===//
//
// The aliasing of a program, from what its calls say of themselves: `views` and
// `mutates`. After it come the plan's own storages (Value::storage), which the
// emitter writes from getStorageOwner.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_DIALECT_STORAGES_H
#define FSDP_DIALECT_STORAGES_H

#include "fsdp/Dialect/Aten.h"
#include "fsdp/Dialect/FSDP.h"

#include "llvm/ADT/DenseMap.h"

namespace mlir::fsdp {

/// Which value's storage a value shares: follows the `views` of aten.call,
/// those that an fsdp.reload_activation gives, and results of an
/// fsdp.microbatches into it, up to the value that owns the storage.
Value getStorageOwner(Value value);

/// `owners`, then the views of them, then the views of these, and so on.
SmallVector<Value> getWithViews(ValueRange owners);

/// The operands that a call writes in place.
ArrayRef<int64_t> getWrittenOperands(aten::CallOp call);

/// Bytes of a dense tensor.
int64_t getNumBytes(RankedTensorType type);

/// Values that share memory, and the calls that write it after its allocation,
/// both in program order.
struct Storage {
  SmallVector<Value> values;
  SmallVector<aten::CallOp> writers;
};

/// All storages of a block, by the value that owns the memory.
class Storages {
public:
  explicit Storages(Block &body);

  Value getOwner(Value value) const { return owners.lookup(value); }
  const Storage &get(Value owner) const { return byOwner.find(owner)->second; }

  /// Whether `op`, or a call after it, writes the storage.
  bool isWrittenFrom(Value owner, Operation *op) const;

private:
  llvm::DenseMap<Value, Value> owners;
  llvm::DenseMap<Value, Storage> byOwner;
};

} // namespace mlir::fsdp

#endif // FSDP_DIALECT_STORAGES_H
