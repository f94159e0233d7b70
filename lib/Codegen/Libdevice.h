//===- Libdevice.h - CUDA's mathematical functions ------------------------===//
#ifndef FSDP_LIB_CODEGEN_LIBDEVICE_H
#define FSDP_LIB_CODEGEN_LIBDEVICE_H

#include "llvm/ADT/StringRef.h"
#include "llvm/IR/Module.h"
#include "llvm/Support/Error.h"

namespace mlir::fsdp {

/// Where libdevice is, the bitcode of the functions that nvcc calls for `exp`
/// and the like: in the toolkit, or beside the torch that this was built with.
/// Empty if it is in neither.
llvm::StringRef getLibdevicePath();

/// Adds the functions of libdevice that `module` declares. An error if there is
/// no libdevice.
llvm::Error linkLibdevice(llvm::Module &module);

} // namespace mlir::fsdp

#endif // FSDP_LIB_CODEGEN_LIBDEVICE_H
