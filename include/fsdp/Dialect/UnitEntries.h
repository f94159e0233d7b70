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

/// Module attribute: an array of the units of the capture but the root, each
/// the array of its modules.
inline constexpr llvm::StringLiteral capturedUnitsAttrName =
    "fsdp.captured_units";
/// Module attribute, a dictionary: the modules that make a difference to these
/// sums as a unit, each with an input. Absent, as the units are, where none
/// does.
inline constexpr llvm::StringLiteral entriesAttrName = "fsdp.entries";

} // namespace mlir::fsdp

#endif // FSDP_DIALECT_UNITENTRIES_H
