//===- ModulePattern.h - patterns of module names in a policy -------------===//
#ifndef FSDP_TRANSFORMS_MODULEPATTERN_H
#define FSDP_TRANSFORMS_MODULEPATTERN_H

#include "llvm/ADT/StringRef.h"

namespace mlir::fsdp {

/// Shell-like match of a dotted name: `*` matches any run within one segment,
/// `**` any run across segments, `?` one character of a segment.
bool matchesPattern(llvm::StringRef pattern, llvm::StringRef name);
/// Whether the pattern matches the module of that name or one that contains it.
bool matchesContainingModule(llvm::StringRef pattern, llvm::StringRef name);

} // namespace mlir::fsdp

#endif // FSDP_TRANSFORMS_MODULEPATTERN_H
