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

/// Whether an op uses what it is given until the step is over: what a program
/// returns, or its loop gives.
static bool keepsAlive(OpOperand &use) {
  if (auto yield = dyn_cast<YieldOp>(use.getOwner()))
    return use.getOperandNumber() < yield.getResults().size();
  return isa<ReturnOp>(use.getOwner());
}

/// The same for the ops of one block; `first` is the op that makes a value, for
/// a value without a use.
static void insertFrees(Block &body, SmallVectorImpl<Operation *> *inserted) {
  /// Values by the last op that touches them, and whether it is one of many
  /// microbatches in which they end.
  llvm::MapVector<std::pair<Operation *, Value>, SmallVector<Value>> ends;
  auto end = [&](Value value, Operation *last) {
    bool isCarried = false;
    for (OpOperand &use : value.getUses()) {
      Operation *user = use.getOwner();
      if (isa<FreeOp>(user) || keepsAlive(use))
        return;
      if (isa<YieldOp>(user)) {
        isCarried = true; // to the next microbatch, but for the last
        continue;
      }
      user = getResultsOp(user); // a collective reads until it is awaited
      user = body.findAncestorOpInBlock(*user);
      if (!last || last->isBeforeInBlock(user))
        last = user;
    }
    if (!last)
      return;
    Operation *maker = getProducer(value);
    bool isOnce = isCarried || (maker && getCondition(maker));
    ends[{last, isOnce ? getCondition(last) : Value()}].push_back(value);
  };
  for (BlockArgument argument : body.getArguments())
    if (isa<RankedTensorType>(argument.getType()) &&
        llvm::none_of(argument.getUsers(), llvm::IsaPred<MicrobatchesOp>))
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
  for (auto &[where, values] : ends) {
    auto [last, condition] = where;
    OpBuilder builder(last->getContext());
    builder.setInsertionPointAfter(last);
    auto free = FreeOp::create(builder, last->getLoc(), values, condition);
    if (inserted)
      inserted->push_back(free);
  }
}

void mlir::fsdp::insertFrees(ProgramOp program,
                             SmallVectorImpl<Operation *> *inserted) {
  ::insertFrees(program.getBody().front(), inserted);
  if (MicrobatchesOp loop = getMicrobatches(program))
    ::insertFrees(*loop.getBlock(), inserted);
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
