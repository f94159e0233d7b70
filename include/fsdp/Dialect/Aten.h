//===- Aten.h - the aten dialect ------------------------------------------===//
#ifndef FSDP_DIALECT_ATEN_H
#define FSDP_DIALECT_ATEN_H

#include "mlir/Bytecode/BytecodeOpInterface.h"
#include "mlir/IR/BuiltinAttributes.h"
#include "mlir/IR/BuiltinTypes.h"
#include "mlir/IR/Dialect.h"
#include "mlir/IR/OpDefinition.h"
#include "mlir/Interfaces/SideEffectInterfaces.h"

#include "fsdp/Dialect/AtenDialect.h.inc"

#define GET_ATTRDEF_CLASSES
#include "fsdp/Dialect/AtenAttrs.h.inc"

#define GET_OP_CLASSES
#include "fsdp/Dialect/AtenOps.h.inc"

#endif // FSDP_DIALECT_ATEN_H
