//===- InsertOptimizer.cpp - update the shards at the end of the step -----===//
#include "fsdp/Transforms/ModulePattern.h"
#include "fsdp/Transforms/Passes.h"

#include "llvm/ADT/DenseMap.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_INSERTOPTIMIZER
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;

/// Whether the pattern of `group` matches a name of `param`.
static bool isMember(ParamGroupOp group, ParamOp param) {
  if (matchesPattern(group.getPattern(), param.getSymName()))
    return true;
  if (auto aliases = param.getAliases())
    for (auto alias : aliases->getAsRange<StringAttr>())
      if (matchesPattern(group.getPattern(), alias))
        return true;
  return false;
}

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
      writes[write.getParamAttr().getAttr()] = write;

    auto groups = llvm::to_vector(module.getOps<ParamGroupOp>());
    SmallVector<bool> used(groups.size());
    SmallVector<Attribute> names;
    SmallVector<Value> grads;
    SmallVector<int64_t> groupOf;
    for (auto param : module.getOps<ParamOp>()) {
      auto group = llvm::find_if(
          groups, [&](ParamGroupOp group) { return isMember(group, param); });
      bool grouped = group != groups.end();
      if (grouped)
        used[group - groups.begin()] = true;
      WriteGradOp write = writes.lookup(param.getSymNameAttr());
      if (!write ||
          (!param.getIgnored() && !isa<ShardedType>(write.getGrad().getType())))
        continue;
      names.push_back(write.getParamAttr());
      grads.push_back(write.getGrad());
      groupOf.push_back(grouped ? group - groups.begin() + 1 : 0);
      write.erase();
    }
    for (auto [group, isUsed] : llvm::zip(groups, used))
      if (!isUsed) {
        group.emitError() << "expected pattern \"" << group.getPattern()
                          << "\" to match a parameter that no group before it "
                             "matches, found none";
        return signalPassFailure();
      }

    Operation *end = program.getBody().front().getTerminator();
    OpBuilder builder(end);
    // fsdp-insert-clipping may have begun the phase.
    if (llvm::none_of(program.getOps<PhaseOp>(), [](PhaseOp phase) {
          return phase.getPhase() == Phase::Optimizer;
        }))
      PhaseOp::create(builder, end->getLoc(), Phase::Optimizer);
    OptimizerStepOp::create(
        builder, end->getLoc(), builder.getArrayAttr(names), grads,
        groups.empty() ? nullptr : builder.getDenseI64ArrayAttr(groupOf));
  }
};
} // namespace
