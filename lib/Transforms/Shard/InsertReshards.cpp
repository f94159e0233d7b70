//===- InsertReshards.cpp - reshard after forward, gather for backward ----===//
//
// A view of a gathered parameter is part of it: what backward uses of such a
// chain of views is cloned onto the second gather.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Dialect/Storages.h"
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/StepProgram.h"

#include "mlir/IR/IRMapping.h"
#include "mlir/IR/Remarks.h"
#include "llvm/ADT/MapVector.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_INSERTRESHARDS
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;

namespace {
struct InsertReshards : mlir::fsdp::impl::InsertReshardsBase<InsertReshards> {
  void runOnModule() override {
    ModuleOp module = getOperation();
    ProgramOp program = getProgram(module);
    if (!program)
      return signalPassFailure();
    PhaseOp backward = getBackward(program);
    llvm::DenseMap<StringAttr, UnitOp> units;
    for (auto unit : module.getOps<UnitOp>())
      units[unit.getSymNameAttr()] = unit;

    for (auto gather : llvm::to_vector(program.getOps<AllGatherOp>()))
      reshard(gather, backward, units[gather.getUnitAttr().getAttr()]);
    if (ProgramOp evaluation = getEvaluationProgram(module))
      for (auto gather : llvm::to_vector(evaluation.getOps<AllGatherOp>()))
        reshardAfterLastUse(gather, "after the last use");
  }

private:
  static void reshard(AllGatherOp gather, PhaseOp backward, UnitOp unit) {
    if (!backward || backward->isBeforeInBlock(gather))
      return reshardAfterLastUse(gather, "after the last use");
    if (!unit.getReshardAfterForward()) {
      reshardAfterLastUse(gather, "after the last use: the unit stays gathered "
                                  "between forward and backward");
      return explain(unit, "stays gathered between forward and backward: "
                           "reshard_after_forward is false");
    }
    AllGatherOp again =
        gatherAgain(gather, backward, unit.getPostForwardSize());
    if (!again) {
      reshardAfterLastUse(gather,
                          "after the last use: backward does not need it");
      return explain(unit, "resharded after forward: backward does not need "
                           "it");
    }
    reshardAfterLastUse(gather, "after the last use in forward: the unit is "
                                "gathered again for backward");
    reshardAfterLastUse(again, "after the last use in backward");
    std::string how = "resharded after forward";
    if (std::optional<int64_t> size = unit.getPostForwardSize())
      how += ", a part on each of " + std::to_string(*size) + " neighbours";
    // Something has to come in between, or nothing is saved.
    Operation *end = *llvm::find_if(gather.getParams().front().getUsers(),
                                    llvm::IsaPred<ReshardOp>);
    bool useful =
        llvm::any_of(llvm::make_range(end->getIterator(), again->getIterator()),
                     [](Operation &op) {
                       auto call = dyn_cast<aten::CallOp>(op);
                       return call && !call.getViews();
                     });
    if (useful)
      explain(unit, how + ", gathered again for backward");
    else
      explain(unit,
              how + ", and immediately gathered again: nothing is computed "
                    "in between",
              /*limited=*/true);
  }

  static void explain(UnitOp unit, const Twine &what, bool limited = false) {
    auto opts = remark::RemarkOpts::name("Reshard").category("fsdp-reshard");
    auto message = limited ? remark::missed(unit.getLoc(), opts)
                           : remark::passed(unit.getLoc(), opts);
    if (message)
      message << ("unit " + unit.getSymName() + ": " + what).str();
  }

  /// Moves the uses in backward to a second gather, from the whole axis or from
  /// the parts that neighbours keep. Returns that gather, or null if backward
  /// uses none of the parameters.
  static AllGatherOp gatherAgain(AllGatherOp gather, PhaseOp backward,
                                 std::optional<int64_t> postForwardSize) {
    SmallVector<OpOperand *> uses;
    Operation *firstUse = nullptr;
    for (Value value : getWithViews(gather.getParams())) {
      // A view that backward takes moves with its operand.
      if (!value.getDefiningOp()->isBeforeInBlock(backward))
        continue;
      for (OpOperand &use : value.getUses()) {
        Operation *user = use.getOwner();
        if (user->isBeforeInBlock(backward))
          continue;
        uses.push_back(&use);
        if (!firstUse || user->isBeforeInBlock(firstUse))
          firstUse = user;
      }
    }
    if (!firstUse)
      return {};

    OpBuilder builder(firstUse);
    IRMapping again;
    SmallVector<Value> shards;
    if (postForwardSize)
      shards = keepParts(gather, backward, *postForwardSize);
    else
      for (Value shard : gather.getShards())
        shards.push_back(builder.clone(*shard.getDefiningOp())->getResult(0));
    auto second =
        createFor<AllGatherOp>(firstUse, builder, gather.getParams().getTypes(),
                               gather.getUnitAttr(), shards);
    again.map(gather.getParams(), second.getParams());

    // Views taken in forward, rebuilt only where backward needs them.
    for (OpOperand *use : uses)
      use->set(rebuild(use->get(), again, builder));
    return second;
  }

  /// Reshards after the last use in forward to parts over a sub-axis.
  static SmallVector<Value> keepParts(AllGatherOp gather, PhaseOp backward,
                                      int64_t size) {
    Operation *lastUse = gather;
    for (Value value : getWithViews(gather.getParams()))
      for (Operation *user : value.getUsers())
        if (user->isBeforeInBlock(backward) && lastUse->isBeforeInBlock(user))
          lastUse = user;
    SmallVector<Type> types;
    for (auto [shard, param] :
         llvm::zip(gather.getShards(), gather.getParams())) {
      ShardingAttr sharding = cast<ShardedType>(shard.getType()).getSharding();
      types.push_back(ShardedType::get(gather.getContext(),
                                       cast<RankedTensorType>(param.getType()),
                                       sharding.getSubAxis(size)));
    }
    OpBuilder builder(gather.getContext());
    builder.setInsertionPointAfter(lastUse);
    auto reshard = createFor<ReshardOp>(
        lastUse, builder, types, gather.getUnitAttr(), gather.getParams());
    setReason(reshard, "after the last use in forward: each of " + Twine(size) +
                           " neighbours keeps a part");
    return llvm::to_vector_of<Value>(reshard.getKept());
  }

  static Value rebuild(Value value, IRMapping &again, OpBuilder &builder) {
    if (Value mapped = again.lookupOrNull(value))
      return mapped;
    Operation *view = value.getDefiningOp();
    for (Value operand : view->getOperands())
      if (isa_and_nonnull<AllGatherOp>(
              getStorageOwner(operand).getDefiningOp()))
        rebuild(operand, again, builder);
    builder.clone(*view, again);
    return again.lookup(value);
  }

  static void reshardAfterLastUse(AllGatherOp gather, const Twine &why) {
    if (llvm::any_of(gather->getUsers(), llvm::IsaPred<ReshardOp>))
      return; // it keeps parts
    Operation *lastUse = gather;
    for (Value value : getWithViews(gather.getParams()))
      for (Operation *user : value.getUsers())
        if (lastUse->isBeforeInBlock(user))
          lastUse = user;
    OpBuilder builder(lastUse->getContext());
    builder.setInsertionPointAfter(lastUse);
    auto reshard =
        createFor<ReshardOp>(lastUse, builder, TypeRange(),
                             gather.getUnitAttr(), gather.getParams());
    setReason(reshard, why);
  }
};
} // namespace
