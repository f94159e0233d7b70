//===- InsertOffloadCopies.cpp - parameters and gradients on the host -----===//
#include "fsdp/Transforms/Passes.h"

#include "mlir/IR/Builders.h"
#include "llvm/ADT/DenseSet.h"
#include "llvm/ADT/MapVector.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_INSERTOFFLOADCOPIES
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;

namespace {
struct InsertOffloadCopies
    : mlir::fsdp::impl::InsertOffloadCopiesBase<InsertOffloadCopies> {
  void runOnOperation() override {
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
    llvm::DenseMap<StringAttr, FlatSymbolRefAttr> unitOf;
    for (auto param : module.getOps<ParamOp>())
      if (FlatSymbolRefAttr unit = param.getUnitAttr();
          unit && offloaded.contains(unit.getAttr()))
        unitOf[param.getSymNameAttr()] = unit;

    copyToDevice(program, offloaded);
    if (ProgramOp evaluation = getEvaluationProgram(module))
      copyToDevice(evaluation, offloaded);
    copyToHost(program, unitOf);
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
      auto copy = CopyToDeviceOp::create(
          builder, gather.getLoc(), gather.getShards().getTypes(),
          gather.getUnitAttr(), gather.getShards());
      gather.getShardsMutable().assign(copy.getCopies());
    }
  }

  /// The gradients' shards of a unit are copied together at the end of
  /// backward, when all reductions are under way.
  static void
  copyToHost(ProgramOp program,
             const llvm::DenseMap<StringAttr, FlatSymbolRefAttr> &unitOf) {
    llvm::MapVector<StringAttr, SmallVector<WriteGradOp>> writes;
    for (auto write : program.getOps<WriteGradOp>())
      if (FlatSymbolRefAttr unit =
              unitOf.lookup(write.getParamAttr().getAttr()))
        if (isa<ShardedType>(write.getGrad().getType()))
          writes[unit.getAttr()].push_back(write);
    OpBuilder builder(program.getBody().front().getTerminator());
    for (auto &[unit, grads] : writes) {
      SmallVector<Attribute> names;
      SmallVector<Value> shards;
      SmallVector<Type> types;
      for (WriteGradOp write : grads) {
        names.push_back(write.getParamAttr());
        shards.push_back(write.getGrad());
        types.push_back(write.getGrad().getType());
      }
      auto copy = CopyToHostOp::create(builder, grads.front().getLoc(), types,
                                       FlatSymbolRefAttr::get(unit),
                                       builder.getArrayAttr(names), shards);
      for (auto [write, host] : llvm::zip(grads, copy.getCopies())) {
        WriteGradOp::create(builder, write.getLoc(), write.getParamAttr(),
                            host);
        write.erase();
      }
    }
  }
};
} // namespace
