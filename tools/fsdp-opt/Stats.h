//===- Stats.h - fsdp-opt --emit stats ------------------------------------===//
#ifndef FSDP_TOOLS_FSDPOPT_STATS_H
#define FSDP_TOOLS_FSDPOPT_STATS_H

#include "fsdp/Plan/Memory.h"
#include "fsdp/Transforms/ExploreMemory.h"
#include "mlir/IR/BuiltinOps.h"
#include "llvm/Support/raw_ostream.h"

namespace mlir::fsdp {

/// Prints parameters, units, bytes a rank holds, and the collectives of a step
/// with their bytes. Bytes of a collective are those that one rank receives
/// (all-gather) or sends (reduce-scatter) in a ring: (W-1)/W of the padded
/// unit. Of a collective that the model itself makes, over ranks of another
/// axis of the mesh, they are those of its operands.
void printStats(ModuleOp module, llvm::raw_ostream &os);

/// Prints what a rank keeps all the time, what the plan's arena takes and what
/// it takes at the least, and what is alive at the peak. `scratch`: measured
/// bytes that operators took for themselves.
void printMemory(const ::fsdp::plan::Plan &plan,
                 ::fsdp::plan::MemoryModel model, int64_t scratch,
                 llvm::raw_ostream &os);

} // namespace mlir::fsdp

#endif // FSDP_TOOLS_FSDPOPT_STATS_H
