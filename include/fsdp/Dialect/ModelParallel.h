//===- ModelParallel.h - axes that the model communicates over ------------===//
#ifndef FSDP_DIALECT_MODELPARALLEL_H
#define FSDP_DIALECT_MODELPARALLEL_H

#include "fsdp/Dialect/Aten.h"
#include "fsdp/Dialect/FSDP.h"
#include "fsdp/Plan/ModelCollectives.h"

#include <optional>

namespace mlir::fsdp {

/// The module's `fsdp.model_parallel`; nullopt if it has none.
std::optional<::fsdp::plan::ModelParallel> getModelParallel(ModuleOp module);
/// The same of the attribute; nullopt if it does not have that form.
std::optional<::fsdp::plan::ModelParallel>
readModelParallel(DictionaryAttr parallel);
/// The attribute.
DictionaryAttr getAttr(const ::fsdp::plan::ModelParallel &parallel,
                       MLIRContext *context);

/// As plan::modelCollective of the IR's call.
std::optional<::fsdp::plan::ModelCollective>
getModelCollective(aten::CallOp call);

} // namespace mlir::fsdp

#endif // FSDP_DIALECT_MODELPARALLEL_H
