//===- Import.h - captures and policies into IR ---------------------------===//
#ifndef FSDP_IMPORT_IMPORT_H
#define FSDP_IMPORT_IMPORT_H

#include "fsdp/Import/Capture.h"
#include "mlir/IR/BuiltinOps.h"
#include "mlir/IR/OwningOpRef.h"

namespace mlir::fsdp {

/// A module at the captured level: parameters, buffers and one program. Every
/// op's location names its module and, where known, the model's source line.
OwningOpRef<ModuleOp> importCapture(const ::fsdp::Capture &capture,
                                    MLIRContext *context);

/// Reads a YAML config and puts its policy into `module`: the mesh for
/// `worldSize` ranks, one fsdp.unit_pattern for each unit, the optimizer.
/// Reports an error at the line of `path` that is wrong.
LogicalResult applyConfig(ModuleOp module, StringRef path, int64_t worldSize);

/// The policy without a config: one root unit, AdamW with its defaults.
LogicalResult applyDefaultConfig(ModuleOp module, int64_t worldSize);

} // namespace mlir::fsdp

#endif // FSDP_IMPORT_IMPORT_H
