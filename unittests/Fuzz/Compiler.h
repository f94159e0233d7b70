//===- Compiler.h - what fuzz targets of the compiler share ---------------===//
#ifndef FSDP_UNITTESTS_FUZZ_COMPILER_H
#define FSDP_UNITTESTS_FUZZ_COMPILER_H

#include "mlir/IR/BuiltinOps.h"
#include "mlir/IR/Diagnostics.h"
#include "mlir/IR/MLIRContext.h"
#include "llvm/ADT/STLFunctionalExtras.h"

namespace fsdp::fuzz {

/// Calls `body` with a context whose errors are counted, and requires an error
/// if it fails and none if it succeeds.
void withDiagnostics(
    llvm::function_ref<llvm::LogicalResult(mlir::MLIRContext &)> body);

} // namespace fsdp::fuzz

#endif // FSDP_UNITTESTS_FUZZ_COMPILER_H
