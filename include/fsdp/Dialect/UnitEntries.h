//===- UnitEntries.h - what a program sums inside units -------------------===//
//
// Gradients of a unit's inputs are summed inside the unit first, as in FSDP2.
// The captured program has the sums of the units that capture knew of.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_DIALECT_UNITENTRIES_H
#define FSDP_DIALECT_UNITENTRIES_H

#include "llvm/ADT/StringRef.h"

namespace mlir::fsdp {

/// Module attribute: an array of all units of the capture except the root, each
/// as an array of its modules.
inline constexpr llvm::StringLiteral capturedUnitsAttrName =
    "fsdp.captured_units";
/// Module attribute, a dictionary: the modules for which being a unit makes a
/// difference to these sums, each with an input. If there is none, this
/// attribute and the units above are absent.
inline constexpr llvm::StringLiteral entriesAttrName = "fsdp.entries";

} // namespace mlir::fsdp

#endif // FSDP_DIALECT_UNITENTRIES_H
