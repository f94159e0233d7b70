//===- KeepLastUnit.cpp - keep the last unit of forward gathered ----------===//
//
// Backward begins with the unit that forward gathers last: its second gather
// would follow at once. Runs after fsdp-insert-all-gathers and before
// fsdp-insert-reshards.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Transforms/Passes.h"
#include "mlir/Pass/PassRegistry.h"
#include "mlir/Tools/Plugins/PassPlugin.h"

using namespace mlir;
using namespace mlir::fsdp;

namespace {
struct KeepLastUnit
    : PassWrapper<KeepLastUnit, LevelPass<Level::Gathered, Level::Gathered>> {
  MLIR_DEFINE_EXPLICIT_INTERNAL_INLINE_TYPE_ID(KeepLastUnit)

  StringRef getArgument() const final { return "keep-last-unit"; }
  StringRef getDescription() const final {
    return "Keep the last unit of forward gathered for backward";
  }

  void runOnModule() override {
    ModuleOp module = getOperation();
    ProgramOp program = getProgram(module);
    if (!program)
      return signalPassFailure();
    AllGatherOp last;
    for (Operation &op : program.getBody().front()) {
      if (auto phase = dyn_cast<PhaseOp>(op);
          phase && phase.getPhase() == Phase::Backward)
        break;
      if (auto gather = dyn_cast<AllGatherOp>(op))
        last = gather;
    }
    if (last)
      module.lookupSymbol<UnitOp>(last.getUnitAttr())
          .setReshardAfterForward(false);
  }
};
} // namespace

extern "C" LLVM_ATTRIBUTE_WEAK PassPluginLibraryInfo mlirGetPassPluginInfo() {
  return {MLIR_PLUGIN_API_VERSION, "KeepLastUnit", "0.1",
          [] { PassRegistration<KeepLastUnit>(); }};
}
