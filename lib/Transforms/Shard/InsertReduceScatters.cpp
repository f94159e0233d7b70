//===- InsertReduceScatters.cpp - reduce a unit's gradients together ------===//
#include "fsdp/Transforms/Passes.h"

#include "llvm/ADT/DenseMap.h"
#include "llvm/ADT/MapVector.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_INSERTREDUCESCATTERS
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;

namespace {
struct InsertReduceScatters
    : mlir::fsdp::impl::InsertReduceScattersBase<InsertReduceScatters> {
  void runOnOperation() override {
    ModuleOp module = getOperation();
    ProgramOp program = getProgram(module);
    if (!program)
      return signalPassFailure();
    llvm::DenseMap<StringAttr, WriteGradOp> writes;
    for (auto write : program.getOps<WriteGradOp>())
      if (isa<RankedTensorType>(write.getGrad().getType()))
        writes[write.getParamAttr().getAttr()] = write;

    for (auto &[unit, params] : getUnitParams(module)) {
      SmallVector<Attribute> names;
      SmallVector<Value> grads;
      SmallVector<Type> types;
      SmallVector<WriteGradOp> replaced;
      Operation *last = nullptr;
      for (ParamOp param : params) {
        WriteGradOp write = writes.lookup(param.getSymNameAttr());
        if (!write)
          continue;
        if (!param.getSharding()) {
          param.emitError("expected a sharding: run fsdp-place-params first");
          return signalPassFailure();
        }
        names.push_back(write.getParamAttr());
        grads.push_back(write.getGrad());
        types.push_back(param.getShardedType());
        replaced.push_back(write);
        if (!last || last->isBeforeInBlock(write))
          last = write;
      }
      if (!last)
        continue;
      OpBuilder builder(module.getContext());
      builder.setInsertionPointAfter(last);
      auto reduce = ReduceScatterOp::create(builder, last->getLoc(), types,
                                            unit.getValue(), ReduceKind::Avg,
                                            builder.getArrayAttr(names), grads);
      for (auto [write, shard] : llvm::zip(replaced, reduce.getShards())) {
        WriteGradOp::create(builder, write.getLoc(), write.getParamAttr(),
                            shard);
        write.erase();
      }
    }
  }
};
} // namespace
