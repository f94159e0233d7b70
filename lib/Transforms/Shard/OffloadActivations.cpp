//===- OffloadActivations.cpp - activations on the host until backward ----===//
#include "fsdp/Dialect/Storages.h"
#include "fsdp/Transforms/ModulePattern.h"
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/StepProgram.h"

#include "mlir/IR/Remarks.h"
#include "llvm/Support/FormatVariadic.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_OFFLOADACTIVATIONS
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;
using aten::CallOp;

namespace {
/// What is copied of a storage, and where.
struct Activation {
  OffloadPatternOp policy;
  /// The owner of the storage, then its values that backward uses.
  SmallVector<Value> values;
  Operation *lastInForward;
  Operation *firstInBackward;
};

struct OffloadActivations
    : mlir::fsdp::impl::OffloadActivationsBase<OffloadActivations> {
  void runOnModule() override {
    ModuleOp module = getOperation();
    ProgramOp program = getProgram(module);
    if (!program)
      return signalPassFailure();
    policies = llvm::to_vector(module.getOps<OffloadPatternOp>());
    if (policies.empty())
      return;
    backward = getBackward(program);
    Block &body = program.getBody().front();
    if (failed(checkMatches(body)))
      return signalPassFailure();
    if (backward) {
      Storages storages(body);
      SmallVector<Activation> found = findActivations(body, storages);
      for (Activation &activation : found)
        offload(activation);
      for (OffloadPatternOp policy : policies)
        remark(policy, found);
    }
    for (OffloadPatternOp policy : policies)
      policy.erase();
  }

private:
  bool isInBackward(Operation *op) const {
    return backward->isBeforeInBlock(op);
  }

  /// The first policy that matches a module which contains the call.
  OffloadPatternOp findPolicy(Operation *op) const {
    for (OffloadPatternOp policy : policies)
      if (matchesContainingModule(policy.getPattern(), getModuleName(op)))
        return policy;
    return {};
  }

  LogicalResult checkMatches(Block &body) const {
    llvm::DenseSet<Operation *> matched;
    for (CallOp call : body.getOps<CallOp>())
      for (OffloadPatternOp policy : policies)
        if (!matched.contains(policy) &&
            matchesContainingModule(policy.getPattern(), getModuleName(call)))
          matched.insert(policy);
    for (OffloadPatternOp policy : policies)
      if (!matched.contains(policy))
        return policy.emitError("pattern \"")
               << policy.getPattern() << "\" matches no module that is called";
    return success();
  }

  SmallVector<Activation> findActivations(Block &body,
                                          const Storages &storages) const {
    SmallVector<Activation> found;
    for (Operation &op : body) {
      if (&op == backward)
        break;
      auto call = dyn_cast<CallOp>(op);
      if (!call)
        continue;
      OffloadPatternOp policy = findPolicy(call);
      if (!policy)
        continue;
      for (Value result : call.getResults())
        if (storages.getOwner(result) == result &&
            getNumBytes(cast<RankedTensorType>(result.getType())) >=
                static_cast<int64_t>(policy.getMinBytes()))
          if (auto activation = getActivation(policy, storages.get(result)))
            found.push_back(std::move(*activation));
    }
    return found;
  }

  /// nullopt for a storage that backward does not use, or that something else
  /// than a call of backward holds.
  std::optional<Activation> getActivation(OffloadPatternOp policy,
                                          const Storage &storage) const {
    Activation activation{policy, {storage.values.front()}, nullptr, nullptr};
    for (Value value : storage.values) {
      Operation *made = value.getDefiningOp();
      if (isInBackward(made))
        continue;
      if (!activation.lastInForward ||
          activation.lastInForward->isBeforeInBlock(made))
        activation.lastInForward = made;
      bool isUsedInBackward = false;
      for (Operation *user : value.getUsers()) {
        if (!isInBackward(user)) {
          if (activation.lastInForward->isBeforeInBlock(user))
            activation.lastInForward = user;
          continue;
        }
        if (!isa<CallOp>(user))
          return std::nullopt;
        isUsedInBackward = true;
        if (!activation.firstInBackward ||
            user->isBeforeInBlock(activation.firstInBackward))
          activation.firstInBackward = user;
      }
      if (isUsedInBackward && value != activation.values.front())
        activation.values.push_back(value);
    }
    if (!activation.firstInBackward)
      return std::nullopt;
    return activation;
  }

  void offload(const Activation &activation) const {
    MLIRContext *context = activation.policy->getContext();
    ValueRange values(activation.values);
    auto type = HostType::get(context, llvm::to_vector(values.getTypes()));
    OpBuilder builder(context);
    builder.setInsertionPointAfter(activation.lastInForward);
    auto copy =
        createFor<OffloadActivationOp>(values.front(), builder, type, values);
    builder.setInsertionPoint(activation.firstInBackward);
    auto back = createFor<ReloadActivationOp>(
        values.front(), builder, values.getTypes(), copy.getHost());
    for (auto [value, again] : llvm::zip(values, back.getValues()))
      value.replaceUsesWithIf(
          again, [&](OpOperand &use) { return isInBackward(use.getOwner()); });
  }

  static void remark(OffloadPatternOp policy, ArrayRef<Activation> all) {
    int64_t count = 0, bytes = 0;
    for (const Activation &activation : all)
      if (activation.policy == policy) {
        ++count;
        bytes += getNumBytes(
            cast<RankedTensorType>(activation.values.front().getType()));
      }
    auto opts =
        remark::RemarkOpts::name("OffloadActivation").category("fsdp-offload");
    std::string text = llvm::formatv("\"{0}\": {1} activations, {2} bytes, are "
                                     "kept on the host until backward",
                                     policy.getPattern(), count, bytes);
    if (count)
      remark::passed(policy.getLoc(), opts) << text;
    else
      remark::missed(policy.getLoc(), opts) << text;
  }

  SmallVector<OffloadPatternOp> policies;
  Operation *backward = nullptr;
};
} // namespace
