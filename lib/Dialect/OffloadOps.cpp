//===- OffloadOps.cpp - verifiers of copies between host and device -------===//
#include "fsdp/Dialect/Aten.h"
#include "fsdp/Dialect/FSDP.h"
#include "fsdp/Dialect/Storages.h"

using namespace mlir;
using namespace mlir::fsdp;

/// Checks that the unit is offloaded and that operands and results have the
/// sharded types of its parameters `names`.
template <typename OpT>
static LogicalResult verifyCopies(SymbolTableCollection &symbols, OpT op,
                                  ArrayRef<Attribute> names,
                                  ValueRange operands, StringRef label) {
  auto unit = symbols.lookupNearestSymbolFrom<UnitOp>(op, op.getUnitAttr());
  if (!unit || !unit.getCpuOffload())
    return op.emitOpError(label) << ": expected " << op.getUnitAttr()
                                 << " to be a unit with cpu_offload";
  SmallVector<Type> results(op->getResultTypes());
  if (auto copy = dyn_cast<CollectiveOpInterface>(op.getOperation()))
    results = copy.getAwaitedTypes();
  if (names.size() != operands.size() || names.size() != results.size())
    return op.emitOpError(label)
           << ": expected " << names.size()
           << " operands and results, got: " << operands.size() << " and "
           << results.size();
  for (auto [name, operand, result] :
       llvm::zip(names, operands.getTypes(), results)) {
    auto param = symbols.lookupNearestSymbolFrom<ParamOp>(
        op, cast<FlatSymbolRefAttr>(name));
    if (!param || param.getUnitAttr() != op.getUnitAttr())
      return op.emitOpError(label)
             << ": expected " << name << " in unit " << op.getUnitAttr();
    if (operand != param.getShardedType() || result != operand)
      return op.emitOpError(label)
             << ": expected " << param.getShardedType() << " for " << name
             << ", got: " << operand << " to " << result;
  }
  return success();
}

LogicalResult CopyToDeviceOp::verifySymbolUses(SymbolTableCollection &symbols) {
  SmallVector<Attribute> names;
  for (Value shard : getShards()) {
    auto read = shard.getDefiningOp<ReadOp>();
    if (!read)
      return emitOpError("CopyToDevice-1: expected operands that are "
                         "fsdp.read, got: ")
             << shard;
    names.push_back(read.getParamAttr());
  }
  return verifyCopies(symbols, *this, names, getShards(), "CopyToDevice-1");
}

LogicalResult CopyToHostOp::verifySymbolUses(SymbolTableCollection &symbols) {
  return verifyCopies(symbols, *this, getParamNames().getValue(), getGrads(),
                      "CopyToHost-1");
}

LogicalResult OffloadPatternOp::verify() {
  if (getPattern().empty())
    return emitOpError("OffloadPattern-1: expected a pattern, got: \"\"");
  if (auto bytes = static_cast<int64_t>(getMinBytes()); bytes < 1)
    return emitOpError("OffloadPattern-1: expected a positive min_bytes, got: ")
           << bytes;
  return success();
}

LogicalResult OffloadActivationOp::verify() {
  if (getValues().empty() ||
      !getValues().front().getDefiningOp<aten::CallOp>() ||
      getStorageOwner(getValues().front()) != getValues().front())
    return emitOpError("OffloadActivation-1: expected the result of a call "
                       "that owns its storage first");
  for (Value value : getValues())
    if (getStorageOwner(value) != getValues().front())
      return emitOpError("OffloadActivation-1: expected values of one storage, "
                         "got: ")
             << value;
  SmallVector<Type> made = getAwaitedTypes();
  Type want = HostType::get(getContext(), llvm::to_vector(getOperandTypes()));
  if (made != ArrayRef<Type>(want))
    return emitOpError("OffloadActivation-2: expected ")
           << want << " or a future of it, got: " << getHost().getType();
  return success();
}

LogicalResult ReloadActivationOp::verify() {
  if (ArrayRef<Type>(getAwaitedTypes()) != getHost().getType().getTypes())
    return emitOpError("ReloadActivation-1: expected the types of ")
           << getHost().getType() << ", got: " << getResultTypes();
  return success();
}
