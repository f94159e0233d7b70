//===- Layouts.h - fsdp-opt --emit layouts --------------------------------===//
#ifndef FSDP_TOOLS_FSDPOPT_LAYOUTS_H
#define FSDP_TOOLS_FSDPOPT_LAYOUTS_H

#include "fsdp/Support/Outputs.h"
#include "mlir/IR/BuiltinOps.h"
#include "mlir/IR/OwningOpRef.h"
#include "mlir/Support/LogicalResult.h"
#include "llvm/ADT/ArrayRef.h"
#include "llvm/ADT/STLFunctionalExtras.h"
#include "llvm/ADT/StringRef.h"
#include "llvm/Support/raw_ostream.h"

#include <string>
#include <vector>

namespace mlir::fsdp {

/// Gives a module, in which units are patterns, the policy for so many ranks.
using ApplyPolicy = llvm::function_ref<LogicalResult(ModuleOp, int64_t)>;
using LoadCapture = llvm::function_ref<OwningOpRef<ModuleOp>(llvm::StringRef)>;

/// Compiles and simulates a step on every mesh of --gpus devices that the
/// captures allow, and prints the fastest first. The captures are of one model,
/// each parallelised over other axes (fsdp.model_parallel); FSDP takes the rest
/// of the devices, shared out between shards and replicas in every way. Fails,
/// after it has printed why, if none has a plan. Prints errors itself.
LogicalResult printLayouts(llvm::StringRef path, LoadCapture load,
                           ApplyPolicy apply, llvm::raw_ostream &os);

/// What --captures names.
std::vector<::fsdp::NamedFile> getLayoutFiles();

/// Rejects the options of --emit layouts without it. Prints errors itself.
LogicalResult checkLayoutOptions(bool isAsked);

} // namespace mlir::fsdp

#endif // FSDP_TOOLS_FSDPOPT_LAYOUTS_H
