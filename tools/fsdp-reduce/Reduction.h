//===- Reduction.h - what a program can do without ------------------------===//
#ifndef FSDP_TOOLS_FSDPREDUCE_REDUCTION_H
#define FSDP_TOOLS_FSDPREDUCE_REDUCTION_H

#include "mlir/IR/BuiltinOps.h"
#include "mlir/IR/OwningOpRef.h"
#include "llvm/ADT/STLFunctionalExtras.h"

namespace mlir::fsdp {

/// Whether a program still shows the fault; failure ends the reduction.
using ShowsFault = llvm::function_ref<FailureOr<bool>(ModuleOp)>;

/// A program that shows the fault, of which no single op and no discardable
/// attribute can be left out any more. `program` must show it, and is not
/// changed. Only programs that the verifiers accept are tested.
/// (MLIR's reduction-tree erases ops whose results are used, and then clones
/// what that leaves.)
FailureOr<OwningOpRef<ModuleOp>> reduceProgram(ModuleOp program,
                                               ShowsFault showsFault);

} // namespace mlir::fsdp

#endif // FSDP_TOOLS_FSDPREDUCE_REDUCTION_H
