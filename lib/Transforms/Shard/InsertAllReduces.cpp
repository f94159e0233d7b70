//===- InsertAllReduces.cpp - average over HSDP's replicas ----------------===//
#include "fsdp/Transforms/Passes.h"

#include "mlir/IR/Builders.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_INSERTALLREDUCES
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;

namespace {
struct InsertAllReduces
    : mlir::fsdp::impl::InsertAllReducesBase<InsertAllReduces> {
  void runOnOperation() override {
    ModuleOp module = getOperation();
    ProgramOp program = getProgram(module);
    if (!program)
      return signalPassFailure();
    int64_t replicas = 1;
    for (auto mesh : module.getOps<MeshOp>())
      replicas = mesh.getMesh().getAxisSize(replicateAxisName).value_or(1);
    if (replicas == 1)
      return;
    for (auto op : module.getOps<AccumulationOp>()) {
      op.emitOpError("is not supported on a mesh with replicas yet");
      return signalPassFailure();
    }
    for (auto reduce : llvm::to_vector(program.getOps<ReduceScatterOp>())) {
      OpBuilder builder(module.getContext());
      builder.setInsertionPointAfter(reduce);
      auto all = AllReduceOp::create(
          builder, reduce.getLoc(), reduce.getShards().getTypes(),
          reduce.getUnit(), reduce.getKind(), replicateAxisName,
          reduce.getParamNamesAttr(), reduce.getShards());
      for (auto [shard, reduced] :
           llvm::zip(reduce.getShards(), all.getReduced()))
        shard.replaceAllUsesExcept(reduced, all);
    }
  }
};
} // namespace
