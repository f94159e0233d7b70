//===- InsertAccumulation.cpp - add the gradients of the microbatches -----===//
#include "fsdp/Transforms/Passes.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_INSERTACCUMULATION
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;

namespace {
struct InsertAccumulation
    : mlir::fsdp::impl::InsertAccumulationBase<InsertAccumulation> {
  void runOnOperation() override {
    ModuleOp module = getOperation();
    auto policies = module.getOps<AccumulationOp>();
    if (policies.empty())
      return;
    AccumulationOp policy = *policies.begin();
    if (policy.getSteps() == 1)
      return;
    ProgramOp program = getProgram(module);
    if (!program || failed(scaleLoss(program, policy.getSteps())))
      return signalPassFailure();
    if (policy.getReduceEachMicrobatch()) {
      accumulateShards(program);
      return;
    }
    // FSDP2 accumulates in the reduction's dtype, whatever the gradients' is.
    for (auto param : module.getOps<ParamOp>())
      if (param.getGradType() != param.getTensorType()) {
        policy.emitError("reduce_each_microbatch = false with the mixed "
                         "precision of unit ")
            << param.getUnitAttr() << " is not supported yet";
        return signalPassFailure();
      }
    accumulateWhole(program);
  }

private:
  /// `(loss / steps).backward()`: autograd divides the 1 that it begins with.
  static LogicalResult scaleLoss(ProgramOp program, int64_t steps) {
    Value loss =
        cast<ReturnOp>(program.getBody().front().getTerminator()).getLoss();
    bool backward = false;
    for (Operation &op : program.getBody().front()) {
      if (auto phase = dyn_cast<PhaseOp>(op))
        backward = phase.getPhase() == Phase::Backward;
      auto call = dyn_cast<aten::CallOp>(op);
      if (!backward || !call)
        continue;
      if (call.getCallee() != "aten::ones_like" ||
          call.getOperands() != ValueRange(loss))
        break;
      OpBuilder builder(program.getContext());
      builder.setInsertionPointAfter(call);
      Value one = call.getResult(0);
      SmallVector<Attribute> args = {builder.getUnitAttr(),
                                     builder.getI64IntegerAttr(steps)};
      OperationState state(call.getLoc(), aten::CallOp::getOperationName());
      state.addOperands(one);
      state.addTypes(one.getType());
      state.addAttribute("callee", builder.getStringAttr("aten::div.Scalar"));
      state.addAttribute("args", builder.getArrayAttr(args));
      Operation *scaled = builder.create(state);
      one.replaceAllUsesExcept(scaled->getResult(0), scaled);
      return success();
    }
    return program.emitOpError(
        "expected backward to begin with aten::ones_like of the loss: "
        "accumulation scales it");
  }

  /// Every backward reduces; the shards are added at its end, when all
  /// reductions are under way.
  static void accumulateShards(ProgramOp program) {
    SmallVector<WriteGradOp> writes;
    for (auto write : program.getOps<WriteGradOp>())
      if (isa<ShardedType>(write.getGrad().getType()))
        writes.push_back(write);
    if (writes.empty())
      return;
    SmallVector<Attribute> names;
    SmallVector<Value> grads;
    for (WriteGradOp write : writes) {
      names.push_back(write.getParamAttr());
      grads.push_back(write.getGrad());
    }
    OpBuilder builder(program.getBody().front().getTerminator());
    auto sums = create(builder, writes.front().getLoc(), names, grads);
    for (auto [write, sum] : llvm::zip(writes, sums.getSums())) {
      WriteGradOp::create(builder, write.getLoc(), write.getParamAttr(), sum);
      write.erase();
    }
  }

  /// Whole gradients are added on each rank; the sums are reduced.
  static void accumulateWhole(ProgramOp program) {
    for (auto reduce : program.getOps<ReduceScatterOp>()) {
      OpBuilder builder(reduce);
      SmallVector<Attribute> names(reduce.getParamNames().getValue());
      auto sums = create(builder, reduce.getLoc(), names,
                         llvm::to_vector(reduce.getGrads()));
      reduce.getGradsMutable().assign(sums.getSums());
      reduce.setLastMicrobatch(true);
    }
    for (auto copy : program.getOps<CopyToHostOp>())
      copy.setLastMicrobatch(true);
  }

  static AccumulateOp create(OpBuilder &builder, Location loc,
                             ArrayRef<Attribute> names, ArrayRef<Value> grads) {
    SmallVector<Type> types;
    for (Value grad : grads)
      types.push_back(grad.getType());
    return AccumulateOp::create(builder, loc, types,
                                builder.getArrayAttr(names), grads);
  }
};
} // namespace
