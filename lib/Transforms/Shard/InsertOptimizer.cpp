//===- InsertOptimizer.cpp - update the shards at the end of the step -----===//
#include "fsdp/Transforms/Passes.h"

#include "llvm/ADT/DenseMap.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_INSERTOPTIMIZER
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;

namespace {
struct InsertOptimizer
    : mlir::fsdp::impl::InsertOptimizerBase<InsertOptimizer> {
  void runOnOperation() override {
    ModuleOp module = getOperation();
    ProgramOp program = getProgram(module);
    if (!program)
      return signalPassFailure();
    if (module.getOps<OptimizerOp>().empty()) {
      module.emitError("expected an fsdp.optimizer in the module, got none");
      return signalPassFailure();
    }
    llvm::DenseMap<StringAttr, WriteGradOp> writes;
    for (auto write : program.getOps<WriteGradOp>())
      if (isa<ShardedType>(write.getGrad().getType()))
        writes[write.getParamAttr().getAttr()] = write;

    SmallVector<Attribute> names;
    SmallVector<Value> grads;
    for (auto param : module.getOps<ParamOp>())
      if (WriteGradOp write = writes.lookup(param.getSymNameAttr())) {
        names.push_back(write.getParamAttr());
        grads.push_back(write.getGrad());
        write.erase();
      }
    Operation *end = program.getBody().front().getTerminator();
    OpBuilder builder(end);
    PhaseOp::create(builder, end->getLoc(), Phase::Optimizer);
    OptimizerStepOp::create(builder, end->getLoc(), builder.getArrayAttr(names),
                            grads);
  }
};
} // namespace
