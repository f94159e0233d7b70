//===- SymbolChecks.h - checks of ops against the symbols they name -------===//
#ifndef FSDP_LIB_DIALECT_SYMBOLCHECKS_H
#define FSDP_LIB_DIALECT_SYMBOLCHECKS_H

#include "fsdp/Dialect/FSDP.h"

namespace mlir::fsdp {

/// The op of type OpT that `name` refers to, or an error on `user`.
template <typename OpT>
OpT lookup(SymbolTableCollection &symbols, Operation *user,
           FlatSymbolRefAttr name, StringRef label) {
  auto op = symbols.lookupNearestSymbolFrom<OpT>(user, name);
  if (!op)
    user->emitOpError(label) << ": expected " << name << " to name an "
                             << OpT::getOperationName() << ", found none";
  return op;
}

/// Checks that `type` is the parameter's sharded type, partial along no axis.
LogicalResult verifyShardType(SymbolTableCollection &symbols, Operation *user,
                              FlatSymbolRefAttr name, Type type,
                              StringRef label);

/// Whether `type` is the parameter's sharded type, partial along some axes of
/// the mesh, in a dtype that a gradient can have.
bool isPartialShardOf(SymbolTableCollection &symbols, Type type, ParamOp param);

} // namespace mlir::fsdp

#endif // FSDP_LIB_DIALECT_SYMBOLCHECKS_H
