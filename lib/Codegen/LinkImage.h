//===- LinkImage.h - an object file as bytes that refer to themselves -----===//
#ifndef FSDP_LIB_CODEGEN_LINKIMAGE_H
#define FSDP_LIB_CODEGEN_LINKIMAGE_H

#include "fsdp/Codegen/Kernels.h"

#include "llvm/Support/Error.h"
#include "llvm/Support/MemoryBufferRef.h"

namespace mlir::fsdp {

/// The code and constants of an ELF object for x86-64, one behind the other,
/// with the function `name` as entry. An error if it needs anything else: other
/// symbols, memory that it writes, relocations that depend on the address.
llvm::Expected<MachineCode> linkImage(llvm::MemoryBufferRef object,
                                      llvm::StringRef name);

} // namespace mlir::fsdp

#endif // FSDP_LIB_CODEGEN_LINKIMAGE_H
