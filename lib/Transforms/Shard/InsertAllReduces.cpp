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
    int64_t replicas = 0;
    for (auto mesh : module.getOps<MeshOp>())
      replicas = mesh.getMesh().getAxisSize(replicateAxisName).value_or(0);
    // FSDP2 adds what it does not all-reduce yet in the dtype of the reduction,
    // over one replica too.
    bool partial =
        llvm::any_of(module.getOps<AccumulationOp>(), [](AccumulationOp op) {
          return op.getSteps() > 1 && op.getReduceEachMicrobatch() &&
                 !op.getAllReduceEachMicrobatch();
        });
    if (replicas < (partial ? 1 : 2))
      return;
    for (auto reduce : llvm::to_vector(program.getOps<ReduceScatterOp>())) {
      if (!llvm::all_of(reduce.getShards().getTypes(),
                        llvm::IsaPred<ShardedType>)) {
        reduce.emitError("expected a result for each gradient: run before "
                         "fsdp-split-collectives");
        return signalPassFailure();
      }
      auto unit = module.lookupSymbol<UnitOp>(reduce.getUnitAttr().getAttr());
      GradientDivisionAttr division = unit.getGradientDivisionAttr();
      bool divides = division && division.getFactor();
      OpBuilder builder(module.getContext());
      builder.setInsertionPointAfter(reduce);
      // The cast to the parameters' dtype, and the division after a sum, come
      // after both reductions.
      SmallVector<Type> types(reduce.getShards().getTypes());
      for (auto [shard, grad] :
           llvm::zip(reduce.getShards(), reduce.getGrads())) {
        Type dtype = cast<RankedTensorType>(grad.getType()).getElementType();
        shard.setType(cast<ShardedType>(shard.getType())
                          .clone(reduce.getReduceDtype().value_or(dtype)));
      }
      auto all = AllReduceOp::create(
          builder, reduce.getLoc(), types, reduce.getUnitAttr(),
          ReduceKindAttr::get(&getContext(),
                              divides ? ReduceKind::Sum : reduce.getKind()),
          builder.getStringAttr(replicateAxisName), reduce.getParamNamesAttr(),
          reduce.getShards(), reduce.getReduceDtypeAttr(),
          reduce.getPostdivideAttr());
      reduce.removePostdivideAttr();
      for (auto [shard, reduced] :
           llvm::zip(reduce.getShards(), all.getReduced()))
        shard.replaceAllUsesExcept(reduced, all);
    }
  }
};
} // namespace
