//===- InsertOffloadCopies.cpp - parameters and gradients on the host -----===//
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/StepGradients.h"
#include "fsdp/Transforms/StepProgram.h"

#include "mlir/IR/Builders.h"
#include "llvm/ADT/DenseSet.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_INSERTOFFLOADCOPIES
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;

namespace {
struct InsertOffloadCopies
    : mlir::fsdp::impl::InsertOffloadCopiesBase<InsertOffloadCopies> {
  void runOnModule() override {
    ModuleOp module = getOperation();
    ProgramOp program = getProgram(module);
    if (!program)
      return signalPassFailure();
    llvm::DenseSet<StringAttr> offloaded;
    for (auto unit : module.getOps<UnitOp>())
      if (unit.getCpuOffload())
        offloaded.insert(unit.getSymNameAttr());
    if (offloaded.empty())
      return;
    copyToDevice(program, offloaded);
    if (ProgramOp evaluation = getEvaluationProgram(module))
      copyToDevice(evaluation, offloaded);
    copyToHost(module, program, offloaded);
  }

private:
  /// Each gather of such a unit takes copies of the shards; one from parts that
  /// groups kept finds them on the device.
  static void copyToDevice(ProgramOp program,
                           const llvm::DenseSet<StringAttr> &offloaded) {
    for (auto gather : program.getOps<AllGatherOp>()) {
      if (!offloaded.contains(gather.getUnitAttr().getAttr()) ||
          !gather.getShards().front().getDefiningOp<ReadOp>())
        continue;
      OpBuilder builder(gather);
      auto copy = createFor<CopyToDeviceOp>(
          gather, builder, gather.getShards().getTypes(), gather.getUnitAttr(),
          gather.getShards(), /*condition=*/Value(), /*buffer=*/Value());
      gather.getShardsMutable().assign(copy.getCopies());
    }
  }

  /// The gradients' shards of a unit are copied together at the end of
  /// backward, when all reductions are under way, in the order of these.
  static void copyToHost(ModuleOp module, ProgramOp program,
                         const llvm::DenseSet<StringAttr> &offloaded) {
    OpBuilder builder(getStepEnd(program));
    auto units = getUnitParams(module);
    llvm::DenseSet<StringAttr> copied; // a unit may have several reductions
    for (auto reduce : program.getOps<ReduceScatterOp>()) {
      StringAttr unit = reduce.getUnitAttr().getAttr();
      if (!copied.insert(unit).second)
        continue;
      StepGradients shards(program, units.lookup(unit), isShard);
      if (!offloaded.contains(unit) || shards.empty())
        continue;
      auto copy = createFor<CopyToHostOp>(
          shards.getValues().front(), builder, shards.getTypes(),
          FlatSymbolRefAttr::get(unit), shards.getNames(), shards.getValues(),
          /*condition=*/Value());
      shards.replaceWith(copy.getCopies());
    }
  }
};
} // namespace
