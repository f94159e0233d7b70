//===- ElementTypes.h - MLIR's element types as the plan's ------*- C++ -*-===//
#ifndef FSDP_TRANSFORMS_LOWER_ELEMENTTYPES_H
#define FSDP_TRANSFORMS_LOWER_ELEMENTTYPES_H

#include "fsdp/Plan/Plan.h"
#include "mlir/IR/Types.h"

namespace mlir::fsdp {

/// The plan's dtype of an element type; nullopt where it has none.
std::optional<::fsdp::plan::DType> getDType(Type type);
/// The element type of a dtype that a buffer has: real, complex or bytes.
Type getElementType(MLIRContext *context, ::fsdp::plan::DType dtype);

} // namespace mlir::fsdp

#endif // FSDP_TRANSFORMS_LOWER_ELEMENTTYPES_H
