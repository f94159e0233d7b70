//===- ModuleNames.h - modules' names in text -----------------------------===//
//
// Passes take the module that made an op from the op's location, which follows
// through every rewrite by itself, but which text without debug info lacks. In
// text it is the attribute `fsdp.module`.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_TRANSFORMS_MODULENAMES_H
#define FSDP_TRANSFORMS_MODULENAMES_H

#include "mlir/Pass/Pass.h"

#include <memory>

namespace mlir::fsdp {

/// Turns the attribute of each op into its location. Runs before all passes.
std::unique_ptr<Pass> createReadModuleNames();

/// Gives each op of a program whose location names a module the attribute.
/// Runs before a module is printed.
std::unique_ptr<Pass> createWriteModuleNames();

} // namespace mlir::fsdp

#endif // FSDP_TRANSFORMS_MODULENAMES_H
