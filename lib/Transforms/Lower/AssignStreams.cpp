//===- AssignStreams.cpp - streams and events of a plan's instructions ----===//
#include "AssignStreams.h"

#include "fsdp/Plan/Operands.h"

using namespace mlir;
using namespace mlir::fsdp;
namespace plan = ::fsdp::plan;

/// Whether the op runs beside computation.
static bool isAsynchronous(Operation *op) {
  // A copy does if the gather of the copies does.
  Operation *collective = op;
  if (isa<CopyToDeviceOp>(op) && !op->use_empty())
    collective = *op->user_begin();
  auto asynchronous = dyn_cast<CollectiveOpInterface>(collective);
  return asynchronous && asynchronous.hasFuture();
}

void StreamAssigner::assign(Operation *op) {
  if (isAsynchronous(op))
    return fork(op);
  if (auto wait = dyn_cast<WaitOp>(op)) {
    instructions.back().waits = {
        eventOf.lookup(wait.getFuture().getDefiningOp())};
  }
  lastCompute = int64_t(instructions.size()) - 1;
}

void StreamAssigner::fork(Operation *op) {
  if (lastCompute == -1 && repeats) {
    // Nothing of the microbatch comes before it: a wait for nothing, so that
    // it follows the compute stream of the microbatch before.
    plan::Instruction begin;
    begin.kind = plan::Wait{};
    begin.phase = instructions.back().phase;
    begin.when = plan::When::Every;
    instructions.insert(instructions.begin(), std::move(begin));
    if (ops)
      ops->insert(ops->begin(), op);
    lastCompute = 0;
  }
  plan::Instruction &instruction = instructions.back();
  instruction.stream = plan::ownStream(instruction);
  int64_t &waited = forked[size_t(instruction.stream)];
  if (lastCompute > waited) {
    plan::EventId &event = instructions[size_t(lastCompute)].records;
    if (event == -1)
      event = numEvents++;
    instruction.waits.push_back(event);
    waited = lastCompute;
  }
  for (Value operand : op->getOperands())
    if (auto it = eventOf.find(operand.getDefiningOp());
        it != eventOf.end() &&
        !llvm::is_contained(instruction.waits, it->second))
      instruction.waits.push_back(it->second);
  eventOf[op] = instruction.records = numEvents++;
}
