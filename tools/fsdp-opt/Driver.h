//===- Driver.h - fsdp-opt as one command ---------------------------------===//
#ifndef FSDP_TOOLS_FSDPOPT_DRIVER_H
#define FSDP_TOOLS_FSDPOPT_DRIVER_H

#include "mlir/IR/DialectRegistry.h"
#include "mlir/Support/LogicalResult.h"
#include "llvm/ADT/ArrayRef.h"
#include "llvm/ADT/StringRef.h"
#include "llvm/Support/raw_ostream.h"

namespace mlir::fsdp {

/// Shows the options of the linked libraries in --help-hidden only. To be
/// called before the options of mlir-opt and of the passes are registered.
void hideLibraryOptions();

/// Prints the instructions that a plan consists of, if the options ask for it.
bool showInstructions(llvm::raw_ostream &os);

/// True when the options ask for more than mlir-opt does: a captured model as
/// input, a config, ranks, a level, a device, a plan to compare with, or an
/// --emit other than IR.
bool isDriverInvocation(llvm::StringRef inputFilename);

/// Rejects an output that is a file that is read, and options that are given
/// twice. Prints errors itself.
LogicalResult checkFiles(llvm::StringRef inputFilename,
                         llvm::StringRef outputFilename);

/// Imports (or parses) the input, applies the policy, runs the pipeline (or
/// the passes given on the command line) and writes what --emit names. With
/// --diff, writes what changed between two plans.
LogicalResult runDriver(llvm::StringRef inputFilename,
                        llvm::StringRef outputFilename,
                        const DialectRegistry &registry);

} // namespace mlir::fsdp

#endif // FSDP_TOOLS_FSDPOPT_DRIVER_H
