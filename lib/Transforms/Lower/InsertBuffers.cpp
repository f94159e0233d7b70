//===- InsertBuffers.cpp - memory of collectives beside their results -----===//
//
// Which op needs memory, of which size and for how long is a matter of the plan
// (DeviceBuffers.h), which the runtime asks too.
//
//===----------------------------------------------------------------------===//
#include "ElementTypes.h"
#include "fsdp/Plan/DeviceBuffers.h"
#include "fsdp/Plan/Memory.h"
#include "fsdp/Transforms/EmitPlan.h"
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/Schedule.h"
#include "fsdp/Transforms/StepProgram.h"

#include "llvm/ADT/TypeSwitch.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_INSERTBUFFERS
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;
namespace plan = ::fsdp::plan;

static void setBuffer(Operation *op, Value buffer) {
  llvm::TypeSwitch<Operation *>(op)
      .Case<ReduceScatterOp, AllReduceOp, CopyToDeviceOp, ReshardOp>(
          [&](auto op) { op.getBufferMutable().assign(buffer); })
      .DefaultUnreachable("an op without a buffer");
}

namespace {
struct InsertBuffers : mlir::fsdp::impl::InsertBuffersBase<InsertBuffers> {
  void runOnModule() override {
    ModuleOp module = getOperation();
    FailureOr<plan::MemoryModel> memory = getMemoryModel(module);
    if (failed(memory))
      return signalPassFailure();
    if (*memory != plan::MemoryModel::Device)
      return;
    PlanOrigins origins;
    FailureOr<plan::Plan> emitted = emitPlan(module, &origins);
    if (failed(emitted))
      return signalPassFailure();
    plan::addDeviceBuffers(*emitted);
    insert(*emitted, emitted->instructions, origins.step);
    insert(*emitted, emitted->evaluation, origins.evaluation);
  }

private:
  static void insert(const plan::Plan &of,
                     ArrayRef<plan::Instruction> instructions,
                     ArrayRef<Operation *> ops) {
    llvm::DenseMap<plan::ValueId, Value> buffers;
    for (auto [instruction, op] : llvm::zip_equal(instructions, ops)) {
      if (instruction.buffer != -1) {
        const plan::TensorSpec &spec = of.values[size_t(instruction.buffer)];
        OpBuilder builder(op);
        auto buffer = createFor<AllocateOp>(
            op, builder,
            RankedTensorType::get(
                spec.shape, getElementType(op->getContext(), spec.dtype)));
        setBuffer(op, buffer.getBuffer());
        buffers[instruction.buffer] = buffer.getBuffer();
      }
      SmallVector<Value> ended;
      for (plan::ValueId value : instruction.frees)
        if (Value buffer = buffers.lookup(value))
          ended.push_back(buffer);
      if (ended.empty())
        continue;
      Operation *last = op;
      while (isa_and_nonnull<FreeOp>(last->getNextNode()))
        last = last->getNextNode();
      OpBuilder builder(op->getContext());
      builder.setInsertionPointAfter(last);
      FreeOp::create(builder, op->getLoc(), ended, getCondition(op));
    }
  }
};
} // namespace
