//===- InsertOptimizer.cpp - update the shards at the end of the step -----===//
#include "fsdp/Transforms/ModulePattern.h"
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/StepProgram.h"

#include "llvm/ADT/SetVector.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_INSERTOPTIMIZER
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;

/// Whether `pattern` matches a name of `param`.
static bool matches(StringRef pattern, ParamOp param) {
  if (matchesPattern(pattern, param.getSymName()))
    return true;
  if (auto aliases = param.getAliases())
    for (auto alias : aliases->getAsRange<StringAttr>())
      if (matchesPattern(pattern, alias))
        return true;
  return false;
}

/// Whether a pattern of `group` matches `param`; those that do leave `unused`.
static bool isMember(ParamGroupOp group, ParamOp param,
                     SetVector<StringRef> &unused) {
  bool member = false;
  for (StringRef pattern : group.getPatterns().getAsValueRange<StringAttr>())
    if (matches(pattern, param)) {
      member = true;
      unused.remove(pattern);
    }
  return member;
}

namespace {
struct InsertOptimizer
    : mlir::fsdp::impl::InsertOptimizerBase<InsertOptimizer> {
  void runOnModule() override {
    ModuleOp module = getOperation();
    ProgramOp program = getProgram(module);
    if (!program)
      return signalPassFailure();
    if (module.getOps<OptimizerOp>().empty()) {
      module.emitError("expected an fsdp.optimizer in the module, got none");
      return signalPassFailure();
    }
    auto groups = llvm::to_vector(module.getOps<ParamGroupOp>());
    SmallVector<SetVector<StringRef>> unused(groups.size());
    for (auto [group, patterns] : llvm::zip(groups, unused))
      patterns.insert_range(group.getPatterns().getAsValueRange<StringAttr>());
    llvm::DenseMap<StringAttr, int64_t> groupOf;
    for (auto param : module.getOps<ParamOp>()) {
      size_t group = 0;
      while (group < groups.size() &&
             !isMember(groups[group], param, unused[group]))
        ++group;
      groupOf[param.getSymNameAttr()] = group < groups.size() ? group + 1 : 0;
    }
    for (auto [group, patterns] : llvm::zip(groups, unused))
      if (!patterns.empty()) {
        group.emitError() << "expected pattern \"" << patterns.front()
                          << "\" to match a parameter that no group before it "
                             "matches, found none";
        return signalPassFailure();
      }

    GradientsOp taken = getGradients(program);
    if (!taken) {
      program.emitOpError("expected an fsdp.gradients, found none");
      return signalPassFailure();
    }
    SmallVector<int64_t> order;
    for (auto name : taken.getParamNames().getAsRange<FlatSymbolRefAttr>())
      order.push_back(groupOf.lookup(name.getAttr()));
    Location loc = program.getBody().front().getTerminator()->getLoc();
    OpBuilder builder = getOptimizerPhaseBuilder(program, loc);
    OptimizerStepOp::create(
        builder, loc, taken.getParamNames(), taken.getGrads(),
        groups.empty() ? nullptr : builder.getDenseI64ArrayAttr(order));
    taken.erase();
  }
};
} // namespace
