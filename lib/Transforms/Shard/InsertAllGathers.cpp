//===- InsertAllGathers.cpp - gather each unit before its first use -------===//
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/StepProgram.h"

#include "llvm/ADT/DenseMap.h"
#include "llvm/ADT/MapVector.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_INSERTALLGATHERS
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;

namespace {
struct InsertAllGathers
    : mlir::fsdp::impl::InsertAllGathersBase<InsertAllGathers> {
  void runOnModule() override {
    ModuleOp module = getOperation();
    ProgramOp program = getProgram(module);
    if (!program)
      return signalPassFailure();

    for (auto param : module.getOps<ParamOp>())
      if (!param.getUnitAttr() && !param.getIgnored()) {
        param.emitError("expected a unit: run fsdp-assign-units first");
        return signalPassFailure();
      }

    for (auto &[unit, params] : getUnitParams(module))
      for (ParamOp param : params)
        if (!param.getSharding()) {
          param.emitError("expected a sharding: run fsdp-place-params first");
          return signalPassFailure();
        }
    gatherUnits(module, program);
    if (ProgramOp evaluation = getEvaluationProgram(module))
      gatherUnits(module, evaluation);
  }

private:
  static void gatherUnits(ModuleOp module, ProgramOp program) {
    llvm::DenseMap<StringAttr, SmallVector<ReadOp>> wholeReads;
    for (auto read : program.getOps<ReadOp>())
      if (isa<RankedTensorType>(read.getResult().getType()))
        wholeReads[read.getParamAttr().getAttr()].push_back(read);

    for (auto &[unit, params] : getUnitParams(module)) {
      Operation *firstUse = nullptr;
      for (ParamOp param : params) {
        for (ReadOp read : wholeReads.lookup(param.getSymNameAttr()))
          for (Operation *user : read->getUsers())
            if (!firstUse || user->isBeforeInBlock(firstUse))
              firstUse = user;
      }
      if (firstUse)
        gather(unit, params, firstUse, wholeReads);
      for (ParamOp param : params)
        for (ReadOp read : wholeReads.lookup(param.getSymNameAttr()))
          read.erase();
    }
  }

  static void
  gather(StringAttr unit, MutableArrayRef<ParamOp> params, Operation *firstUse,
         const llvm::DenseMap<StringAttr, SmallVector<ReadOp>> &wholeReads) {
    OpBuilder builder(firstUse);
    SmallVector<Value> shards;
    SmallVector<Type> types;
    for (ParamOp param : params) {
      shards.push_back(createFor<ReadOp>(
          firstUse, builder, param.getShardedType(), param.getSymName()));
      types.push_back(param.getComputeType());
    }
    auto gathered = createFor<AllGatherOp>(
        firstUse, builder, types, FlatSymbolRefAttr::get(unit), shards);
    for (auto [param, whole] : llvm::zip(params, gathered.getParams()))
      for (ReadOp read : wholeReads.lookup(param.getSymNameAttr()))
        read.getResult().replaceAllUsesWith(whole);
  }
};
} // namespace
