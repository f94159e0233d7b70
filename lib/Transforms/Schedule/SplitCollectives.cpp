//===- SplitCollectives.cpp - collectives begin, and are waited for -------===//
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/StepProgram.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_SPLITCOLLECTIVES
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;

namespace {
struct SplitCollectives
    : mlir::fsdp::impl::SplitCollectivesBase<SplitCollectives> {
  void runOnModule() override {
    for (auto program : getOperation().getOps<ProgramOp>())
      program.walk([](CollectiveOpInterface collective) {
        if (!collective.hasFuture())
          split(collective);
      });
  }

private:
  static void split(Operation *op) {
    OpBuilder builder(op);
    auto future = FutureType::get(op->getContext(),
                                  llvm::to_vector(op->getResultTypes()));
    OperationState state(op->getLoc(), op->getName(), op->getOperands(),
                         TypeRange(future));
    state.propertiesAttr = op->getPropertiesAsAttribute();
    state.addAttributes(
        llvm::to_vector(op->getDiscardableAttrDictionary().getValue()));
    Operation *begun = builder.create(state);
    auto wait =
        createFor<WaitOp>(op, builder, future.getTypes(), begun->getResult(0));
    op->replaceAllUsesWith(wait.getValues());
    op->erase();
  }
};
} // namespace
