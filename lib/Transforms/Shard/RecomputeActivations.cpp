//===- RecomputeActivations.cpp - activation checkpointing ----------------===//
//
// What is recomputed or kept is a storage: a value that some call allocates,
// with all its views and all calls that write it in place. A storage of the
// module's forward is recomputed unless one of its writers cannot be called
// again, or something outside the module's backward holds it anyway.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Dialect/Storages.h"
#include "fsdp/Transforms/ModulePattern.h"
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/StepProgram.h"

#include "fsdp/Plan/OperatorWork.h"
#include "fsdp/Simulate/Format.h"
#include "mlir/IR/IRMapping.h"
#include "mlir/IR/Remarks.h"
#include "llvm/ADT/DenseMap.h"
#include "llvm/ADT/DenseSet.h"
#include "llvm/ADT/StringMap.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_RECOMPUTEACTIVATIONS
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;
using aten::CallOp;
using ::fsdp::simulate::formatBytes;

namespace {
/// An entry of a policy's `save`.
struct SavedOperator {
  StringRef name;    ///< with or without overload
  int64_t every = 1; ///< of so many calls the first is kept

  bool matches(CallOp call) const {
    StringRef callee = call.getCallee();
    if (name == productsName)
      return ::fsdp::plan::isProduct(callee);
    return name == callee || name == callee.split('.').first;
  }
};

SavedOperator parseSaved(StringAttr entry) {
  auto [name, every] = entry.getValue().split('/');
  SavedOperator saved{name};
  if (!every.empty()) // CheckpointPattern-1: a positive number
    every.getAsInteger(10, saved.every);
  return saved;
}

/// A checkpointed module, and the policy that names it.
struct Checkpoint {
  StringRef module;
  CheckpointPatternOp policy;
};

/// The calls that a checkpointed module makes in forward without a call of
/// another module in between.
struct Run {
  Checkpoint checkpoint;
  SmallVector<CallOp> calls;
};

/// Why a storage is kept for backward all the same.
enum class KeptBecause { Policy, Random, OperandsChange, UsedElsewhere };
constexpr size_t kNumKeptBecause = 4;

/// Recomputes what one run's backward uses.
class RunRecomputer {
public:
  RunRecomputer(Run &run, const Storages &storages, Operation *backward)
      : run(run), storages(storages), backward(backward),
        inRun(run.calls.begin(), run.calls.end()) {
    findSaved();
  }

  void recompute() {
    for (CallOp call : run.calls) {
      if (std::optional<KeptBecause> obstacle = findObstacle(call))
        pin(call, *obstacle);
      for (OpResult result : call->getOpResults())
        if (ownsStorage(result) && isHeldAnyway(result))
          keep(result, KeptBecause::UsedElsewhere);
    }
    propagate();
    Operation *firstUse = needWhatBackwardUses();
    explain();
    if (firstUse)
      cloneBefore(firstUse);
  }

private:
  bool ownsStorage(Value value) const {
    return storages.getOwner(value) == value;
  }
  bool isOwned(Value owner) const {
    Operation *op = owner.getDefiningOp();
    return op && inRun.contains(op);
  }
  bool isRecomputed(Value value) const {
    Value owner = storages.getOwner(value);
    return isOwned(owner) && !kept.contains(owner);
  }
  bool isInBackward(Operation *op) const {
    return backward->isBeforeInBlock(op);
  }

  /// Whether `op` is a call of this module's backward; a call that another
  /// run's recomputation made is not.
  bool isOwnBackward(Operation *op) const {
    auto call = dyn_cast<CallOp>(op);
    if (!call || call.getRecompute())
      return false;
    StringRef module = getModuleName(op);
    return module.consume_front(run.checkpoint.module) &&
           (module.empty() || module.front() == '.');
  }

  /// The calls whose results are kept because the policy says so.
  void findSaved() {
    ArrayAttr save = run.checkpoint.policy.getSaveAttr();
    if (!save)
      return;
    for (StringAttr entry : save.getAsRange<StringAttr>()) {
      SavedOperator saved = parseSaved(entry);
      int64_t count = 0;
      for (CallOp call : run.calls)
        if (saved.matches(call) && count++ % saved.every == 0)
          savedCalls.insert(call);
    }
  }

  /// Why a second call in backward is not wanted, or would not do what the
  /// first one did, if the storages that the run owns are recomputed.
  std::optional<KeptBecause> findObstacle(CallOp call) const {
    if (savedCalls.contains(call))
      return KeptBecause::Policy;
    if (call.getRandom())
      return KeptBecause::Random;
    for (Value operand : call.getOperands()) {
      Value owner = storages.getOwner(operand);
      if (!isOwned(owner) && storages.isWrittenFrom(owner, call))
        return KeptBecause::OperandsChange;
    }
    return std::nullopt;
  }

  /// Whether the storage outlives forward whatever this run does, or changes
  /// outside the run.
  bool isHeldAnyway(Value owner) const {
    const Storage &storage = storages.get(owner);
    for (CallOp writer : storage.writers)
      if (!inRun.contains(writer))
        return true;
    for (Value value : storage.values)
      for (Operation *user : value.getUsers())
        if (isInBackward(user) && !isOwnBackward(user))
          return true;
    return false;
  }

  void pin(CallOp call, KeptBecause why) {
    if (pinned.try_emplace(call, why).second)
      worklist.push_back(call);
  }

  void keep(Value owner, KeptBecause why) {
    if (!kept.try_emplace(owner, why).second)
      return;
    const Storage &storage = storages.get(owner);
    pin(owner.getDefiningOp<CallOp>(), why);
    for (CallOp writer : storage.writers)
      if (inRun.contains(writer))
        pin(writer, why);
    // In backward it holds what was written last.
    for (Value value : storage.values)
      for (Operation *user : value.getUsers())
        if (inRun.contains(user) && storages.isWrittenFrom(owner, user))
          pin(cast<CallOp>(user), why);
  }

  /// Keeps everything that pinned calls allocate or write.
  void propagate() {
    while (!worklist.empty()) {
      CallOp call = worklist.pop_back_val();
      KeptBecause why = pinned.lookup(call);
      for (OpResult result : call->getOpResults())
        if (ownsStorage(result))
          keep(result, why);
      for (int64_t operand : getWrittenOperands(call)) {
        Value owner = storages.getOwner(call.getOperand(operand));
        if (isOwned(owner))
          keep(owner, why);
      }
    }
  }

  /// Collects the calls to clone; returns the first op in backward that uses
  /// their results, or null.
  Operation *needWhatBackwardUses() {
    Operation *firstUse = nullptr;
    for (CallOp call : run.calls)
      for (Value result : call.getResults()) {
        if (!isRecomputed(result))
          continue;
        for (Operation *user : result.getUsers()) {
          if (!isInBackward(user))
            continue;
          need(result);
          if (!firstUse || user->isBeforeInBlock(firstUse))
            firstUse = user;
        }
      }
    while (!worklist.empty()) {
      CallOp call = worklist.pop_back_val();
      for (Value operand : call.getOperands())
        if (isRecomputed(operand))
          need(operand);
      for (Value result : call.getResults())
        need(result);
    }
    return firstUse;
  }

  /// Needs the calls that make `value`, and all that write its storage.
  void need(Value value) {
    auto needCall = [&](CallOp call) {
      if (needed.insert(call).second)
        worklist.push_back(call);
    };
    needCall(value.getDefiningOp<CallOp>());
    for (CallOp writer : storages.get(storages.getOwner(value)).writers)
      needCall(writer);
  }

  bool isUsedInBackward(Value owner) const {
    return llvm::any_of(storages.get(owner).values, [&](Value value) {
      return llvm::any_of(value.getUsers(),
                          [&](Operation *user) { return isInBackward(user); });
    });
  }

  /// Reports what the run makes and backward uses: what is recomputed, and what
  /// is kept although the policy does not ask for it.
  void explain() const {
    Location loc = run.calls.front().getLoc();
    if (!loc->getContext()->getRemarkEngine())
      return;
    int64_t dropped = 0;
    std::array<int64_t, kNumKeptBecause> bytes = {};
    for (CallOp call : run.calls)
      for (Value result : call.getResults())
        if (ownsStorage(result) && isUsedInBackward(result)) {
          auto it = kept.find(result);
          (it == kept.end() ? dropped : bytes[size_t(it->second)]) +=
              getNumBytes(cast<RankedTensorType>(result.getType()));
        }
    std::string name = "module " + run.checkpoint.module.str() + ": ";
    auto opts =
        remark::RemarkOpts::name("Recompute").category("fsdp-recompute");
    remark::passed(loc, opts)
        << name + std::to_string(needed.size()) +
               (needed.size() == 1 ? " call is" : " calls are") +
               " recomputed in backward, " + formatBytes(dropped) +
               " are not kept" +
               (bytes[0] > 0
                    ? ", " + formatBytes(bytes[0]) + " are, because of save"
                    : "");
    constexpr const char *whys[kNumKeptBecause] = {
        "", "from a random operator", "because operands change later",
        "because others use them"};
    std::string list;
    for (size_t why = 1; why < kNumKeptBecause; ++why)
      if (bytes[why] > 0)
        list += (list.empty() ? "" : ", ") + formatBytes(bytes[why]) + " " +
                whys[why];
    if (!list.empty())
      remark::missed(loc, opts)
          << name + "kept for backward all the same: " + list;
  }

  void cloneBefore(Operation *firstUse) {
    OpBuilder builder(firstUse);
    IRMapping again;
    for (CallOp call : run.calls) {
      if (!needed.contains(call))
        continue;
      auto clone = cast<CallOp>(builder.clone(*call, again));
      clone.setRecompute(true);
      setReason(clone, "activations of " + run.checkpoint.module +
                           " are made again where backward first uses them");
      for (auto [first, second] :
           llvm::zip(call.getResults(), clone.getResults()))
        first.replaceUsesWithIf(second, [&](OpOperand &use) {
          return isInBackward(use.getOwner());
        });
    }
  }

  Run &run;
  const Storages &storages;
  Operation *backward;
  llvm::DenseSet<Operation *> inRun, savedCalls, needed;
  llvm::DenseMap<Operation *, KeptBecause> pinned;
  llvm::DenseMap<Value, KeptBecause> kept;
  SmallVector<CallOp> worklist;
};

struct RecomputeActivations
    : mlir::fsdp::impl::RecomputeActivationsBase<RecomputeActivations> {
  void runOnModule() override {
    ModuleOp module = getOperation();
    ProgramOp program = getProgram(module);
    if (!program)
      return signalPassFailure();
    policies = llvm::to_vector(module.getOps<CheckpointPatternOp>());
    if (policies.empty())
      return;
    Block &body = program.getBody().front();
    Operation *backward = getBackward(program);
    SmallVector<Run> runs = findRuns(body, backward);
    for (CheckpointPatternOp policy : policies)
      if (failed(checkMatches(policy, runs)))
        return signalPassFailure();

    // The last module first: its recomputation uses what earlier ones made.
    if (backward) {
      Storages storages(body);
      for (Run &run : llvm::reverse(runs))
        RunRecomputer(run, storages, backward).recompute();
    }
    for (CheckpointPatternOp policy : policies)
      policy.erase();
  }

private:
  SmallVector<Run> findRuns(Block &body, Operation *backward) {
    SmallVector<Run> runs;
    StringRef current;
    for (Operation &op : body) {
      if (&op == backward)
        break;
      auto call = dyn_cast<CallOp>(op);
      if (!call)
        continue;
      std::optional<Checkpoint> checkpoint =
          findCheckpoint(getModuleName(call));
      if (checkpoint && checkpoint->module != current)
        runs.push_back({*checkpoint, {}});
      current = checkpoint ? checkpoint->module : StringRef();
      if (checkpoint)
        runs.back().calls.push_back(call);
    }
    return runs;
  }

  /// The outermost module that contains `name` and that a policy matches.
  std::optional<Checkpoint> findCheckpoint(StringRef name) {
    auto [it, inserted] = checkpointOfModule.try_emplace(name, std::nullopt);
    if (!inserted || name.empty())
      return it->second;
    for (size_t end = name.find('.');; end = name.find('.', end + 1)) {
      StringRef prefix = name.take_front(end);
      for (CheckpointPatternOp policy : policies)
        if (matchesPattern(policy.getPattern(), prefix))
          return it->second = Checkpoint{prefix, policy};
      if (end == StringRef::npos)
        return std::nullopt;
    }
  }

  static LogicalResult checkMatches(CheckpointPatternOp policy,
                                    ArrayRef<Run> runs) {
    llvm::DenseSet<StringRef> called;
    for (const Run &run : runs)
      if (run.checkpoint.policy == policy)
        for (CallOp call : run.calls) {
          called.insert(productsName); // whether there are any or not
          called.insert(call.getCallee());
          called.insert(call.getCallee().split('.').first);
        }
    if (called.empty())
      return policy.emitError("pattern \"")
             << policy.getPattern() << "\" matches no module that is called";
    if (ArrayAttr save = policy.getSaveAttr())
      for (auto name : save.getAsRange<StringAttr>())
        if (StringRef callee = parseSaved(name).name; !called.contains(callee))
          return policy.emitError("no module that matches \"")
                 << policy.getPattern() << "\" calls the operator \"" << callee
                 << '"';
    return success();
  }

  SmallVector<CheckpointPatternOp> policies;
  llvm::StringMap<std::optional<Checkpoint>> checkpointOfModule;
};
} // namespace
