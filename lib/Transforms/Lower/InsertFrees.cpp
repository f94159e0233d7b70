//===- InsertFrees.cpp - the end of every value's life --------------------===//
#include "fsdp/Transforms/InsertFrees.h"
#include "fsdp/Transforms/Passes.h"

#include "llvm/ADT/MapVector.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_INSERTFREES
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;

void mlir::fsdp::insertFrees(ProgramOp program,
                             SmallVectorImpl<Operation *> *inserted) {
  Block &body = program.getBody().front();

  // Values by the last op that touches them; the program's result lives on.
  llvm::MapVector<Operation *, SmallVector<Value>> ends;
  auto end = [&](Value value, Operation *last) {
    for (Operation *user : value.getUsers()) {
      if (isa<FreeOp, ReturnOp>(user))
        return;
      user = getResultsOp(user); // a collective reads until it is awaited
      if (!last || last->isBeforeInBlock(user))
        last = user;
    }
    if (last)
      ends[last].push_back(value);
  };
  for (BlockArgument argument : body.getArguments())
    end(argument, nullptr);
  for (Operation &op : body) {
    if (op.getNumResults() > 0 && getGather(op.getResult(0)))
      continue;             // ended by its reshard
    if (isa<ReshardOp>(op)) // parts end with the gather from them
      continue;
    if (isa<ReadOp, CopyToDeviceOp>(op)) // shards that a gather owns
      continue;
    for (Value result : op.getResults())
      if (!isa<FutureType>(result.getType()))
        end(result, &op);
  }
  for (auto &[last, values] : ends) {
    OpBuilder builder(last->getContext());
    builder.setInsertionPointAfter(last);
    auto free = FreeOp::create(builder, last->getLoc(), values);
    if (inserted)
      inserted->push_back(free);
  }
}

namespace {
struct InsertFrees : mlir::fsdp::impl::InsertFreesBase<InsertFrees> {
  void runOnModule() override {
    ProgramOp program = getProgram(getOperation());
    if (!program)
      return signalPassFailure();
    insertFrees(program);
    if (ProgramOp init = getInitProgram(getOperation()))
      insertFrees(init);
    if (ProgramOp evaluation = getEvaluationProgram(getOperation()))
      insertFrees(evaluation);
  }
};
} // namespace
