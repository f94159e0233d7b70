//===- Storages.h - values that share memory ------------------------------===//
//
// The aliasing of a program, derived from the `views` and `mutates` of its
// calls. The plan's own storages (Value::storage) follow from it: the emitter
// writes them from getStorageOwner.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_DIALECT_STORAGES_H
#define FSDP_DIALECT_STORAGES_H

#include "fsdp/Dialect/Aten.h"
#include "fsdp/Dialect/FSDP.h"

#include "llvm/ADT/DenseMap.h"

namespace mlir::fsdp {

/// Which value's storage a value shares: follows the `views` of aten.call, the
/// views that an fsdp.reload_activation returns, and the results of an
/// fsdp.microbatches into the loop, up to the value that owns the storage.
Value getStorageOwner(Value value);

/// `owners`, then the views of them, then the views of these, and so on.
SmallVector<Value> getWithViews(ValueRange owners);

/// The operands that a call writes in place.
ArrayRef<int64_t> getWrittenOperands(aten::CallOp call);

/// Strides in elements; none where the program does not say them.
std::optional<SmallVector<int64_t>> getStrides(Value value);

/// Whether the program says that the value is row-major.
bool isRowMajor(Value value);

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
