//===- InsertFrees.h - the end of every value's life ----------------------===//
#ifndef FSDP_TRANSFORMS_INSERTFREES_H
#define FSDP_TRANSFORMS_INSERTFREES_H

#include "fsdp/Dialect/FSDP.h"

namespace mlir::fsdp {

/// Inserts an fsdp.free after the last use of each value of the program; the
/// life of what a collective reads ends with the wait for the collective.
/// Appends the ops to `inserted`.
void insertFrees(ProgramOp program,
                 llvm::SmallVectorImpl<Operation *> *inserted = nullptr);

} // namespace mlir::fsdp

#endif // FSDP_TRANSFORMS_INSERTFREES_H
