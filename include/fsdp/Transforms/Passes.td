//===- Passes.td - passes of fsdp-opt, by stage -------------*- tablegen -*-===//
//
// docs/passes.md is generated from this file and those that it includes, with
// each pass's IR before and after taken from its test.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_TRANSFORMS_PASSES_TD
#define FSDP_TRANSFORMS_PASSES_TD

include "mlir/Pass/PassBase.td"

/// A pass that takes modules at level `from` and leaves them at level `to`.
class LevelPass<string argument, string from, string to>
    : PassBase<argument, "::mlir::fsdp::LevelPass<::mlir::fsdp::Level::" # from #
                             ", ::mlir::fsdp::Level::" # to # ">"> {
  let dependentDialects = ["::mlir::fsdp::FSDPDialect"];
}

// In the order of the stages.
include "fsdp/Transforms/ShardPasses.td"
include "fsdp/Transforms/SchedulePasses.td"
include "fsdp/Transforms/LowerPasses.td"

#endif // FSDP_TRANSFORMS_PASSES_TD
