//===- PlaceStorages.cpp - every storage's place in the arena -------------===//
//
// Lifetimes and offsets are a matter of the plan (Memory.h): its verifier, the
// statistics and the runtime ask there too.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Plan/Memory.h"
#include "fsdp/Transforms/EmitPlan.h"
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/Schedule.h"

#include "mlir/IR/Builders.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_PLACESTORAGES
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;
namespace plan = ::fsdp::plan;

namespace {
struct PlaceStorages : mlir::fsdp::impl::PlaceStoragesBase<PlaceStorages> {
  void runOnModule() override {
    ModuleOp module = getOperation();
    PlanOrigins origins;
    FailureOr<plan::MemoryModel> memory = getMemoryModel(module);
    if (failed(memory))
      return signalPassFailure();
    FailureOr<plan::Plan> emitted = emitPlan(module, &origins);
    if (failed(emitted))
      return signalPassFailure();
    try {
      plan::verifyPlan(*emitted, "plan");
    } catch (const plan::PlanError &error) {
      module.emitError("is not a valid plan: ") << error.what();
      return signalPassFailure();
    }
    plan::layOutArena(*emitted, *memory);
    bool isShared = *memory == plan::MemoryModel::SharedHost;
    module->setAttr(
        memoryAttrName,
        StringAttr::get(&getContext(), isShared ? "shared" : "device"));
    setArena(module, arenaAttrName, emitted->arena);
    setArena(module, hostArenaAttrName, emitted->hostArena);
    for (auto [value, of] : llvm::zip(emitted->values, origins.values))
      if (value.offset != -1)
        setOffset(of, value.offset);
    for (auto &[op, bytes] : offsets)
      op->setDiscardableAttr(offsetsAttrName,
                             DenseI64ArrayAttr::get(&getContext(), bytes));
    offsets.clear();
  }

private:
  static void setArena(ModuleOp module, StringRef name,
                       const std::optional<plan::Arena> &arena) {
    if (!arena)
      return;
    Builder builder(module.getContext());
    module->setAttr(
        name,
        builder.getDictionaryAttr(
            {builder.getNamedAttr("bytes",
                                  builder.getI64IntegerAttr(arena->bytes)),
             builder.getNamedAttr("lower_bound", builder.getI64IntegerAttr(
                                                     arena->lowerBound))}));
  }

  void setOffset(Value value, int64_t offset) {
    if (auto result = dyn_cast<OpResult>(value)) {
      SmallVector<int64_t> &all = offsets[result.getOwner()];
      all.resize(result.getOwner()->getNumResults(), -1);
      all[result.getResultNumber()] = offset;
      return;
    }
    auto argument = cast<BlockArgument>(value);
    auto program = cast<ProgramOp>(argument.getOwner()->getParentOp());
    program.setArgAttr(argument.getArgNumber(), offsetAttrName,
                       Builder(&getContext()).getI64IntegerAttr(offset));
  }

  llvm::MapVector<Operation *, SmallVector<int64_t>> offsets;
};
} // namespace
