//===- InsertAllReduces.cpp - average over HSDP's replicas ----------------===//
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/StepProgram.h"

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
  void runOnModule() override {
    ModuleOp module = getOperation();
    ProgramOp program = getProgram(module);
    if (!program)
      return signalPassFailure();
    SymbolTable symbols(module);
    for (auto reduce : llvm::to_vector(program.getOps<ReduceScatterOp>())) {
      if (!llvm::all_of(reduce.getShards().getTypes(),
                        llvm::IsaPred<ShardedType>)) {
        reduce.emitError("expected a result for each gradient: run before "
                         "fsdp-split-collectives");
        return signalPassFailure();
      }
      auto first = cast<ShardedType>(reduce.getShards().front().getType());
      if (!first.getSharding().isPartialAlong(replicateAxisName))
        continue;
      auto unit = module.lookupSymbol<UnitOp>(reduce.getUnitAttr().getAttr());
      GradientDivisionAttr division = unit.getGradientDivisionAttr();
      bool divides = division && division.getFactor();
      OpBuilder builder(module.getContext());
      builder.setInsertionPointAfter(reduce);
      SmallVector<Type> types;
      for (auto name : reduce.getParamNames().getAsRange<FlatSymbolRefAttr>())
        types.push_back(
            symbols.lookup<ParamOp>(name.getValue()).getShardedType());
      auto all = createFor<AllReduceOp>(
          reduce, builder, types, reduce.getUnitAttr(),
          ReduceKindAttr::get(&getContext(),
                              divides ? ReduceKind::Sum : reduce.getKind()),
          builder.getStringAttr(replicateAxisName), reduce.getParamNamesAttr(),
          reduce.getShards(), reduce.getReduceDtypeAttr(),
          reduce.getPostdivideAttr(), /*condition=*/Value(),
          /*buffer=*/Value());
      // The division after a sum comes after both reductions.
      reduce.removePostdivideAttr();
      for (auto [shard, reduced] :
           llvm::zip(reduce.getShards(), all.getReduced()))
        shard.replaceAllUsesExcept(reduced, all);
    }
  }
};
} // namespace
