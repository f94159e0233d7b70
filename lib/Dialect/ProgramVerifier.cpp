//===- ProgramVerifier.cpp - typestate of parameters and values -----------===//
//
// One scan over the straight-line program, in execution order. It proves what
// no single op can: when gathered parameters are alive, that gradients are
// reduced once, that nothing is used after its end.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Dialect/FSDP.h"

#include "fsdp/Dialect/Aten.h"
#include "fsdp/Dialect/ModelParallel.h"
#include "fsdp/Dialect/Storages.h"
#include "llvm/ADT/DenseMap.h"
#include "llvm/ADT/DenseSet.h"

using namespace mlir;
using namespace mlir::fsdp;

namespace {
class ProgramVerifier {
public:
  explicit ProgramVerifier(ProgramOp program)
      : program(program), isInit(program.getResultTypes().empty()) {
    auto module = dyn_cast_or_null<ModuleOp>(program->getParentOp());
    if (!module)
      return;
    parallel = getModelParallel(module);
    for (auto param : module.getOps<ParamOp>())
      params.insert({param.getSymNameAttr(), param});
  }

  LogicalResult run() {
    if (!llvm::hasSingleElement(program.getBody()))
      return program.emitOpError("expected a body of one block");
    if (isInit && !program.getArgumentTypes().empty())
      return program.emitOpError(
                 "Program-7: expected no arguments of a program "
                 "without a result, got: ")
             << program.getArgumentTypes().size();
    if (failed(verifyArguments()))
      return failure();
    if (program.getEvaluation() && failed(verifyEvaluation()))
      return failure();
    loop = getMicrobatches(program);
    for (Operation &op : program.getBody().front()) {
      takesGradients |= isa<GradientsOp, OptimizerStepOp>(op);
      if (auto none = dyn_cast<NoGradientOp>(op))
        for (auto name : none.getParamNames().getAsRange<FlatSymbolRefAttr>())
          if (!withoutGradient.insert(name.getAttr()).second)
            return none.emitOpError("NoGradient-1: expected ")
                   << name << " to be named once";
      if (isa<MicrobatchesOp>(op) && &op != loop)
        return op.emitOpError("Program-20: expected one loop over "
                              "microbatches, which gives the loss, got one "
                              "that does not");
    }
    if (failed(visitBlock(program.getBody().front())))
      return failure();
    if (!underWay.empty())
      return underWay.front().first->emitOpError(
          "Program-10: expected a wait for its future, found none");
    if (failed(verifyGradients()))
      return failure();
    return verifyMicrobatches();
  }

private:
  /// Program-15.
  LogicalResult verifyArguments() {
    for (unsigned i = 0; i < program.getNumArguments(); ++i) {
      Attribute attr = program.getArgAttr(i, inputStridesAttrName);
      auto strides = dyn_cast_or_null<DenseI64ArrayAttr>(attr);
      auto type = dyn_cast<RankedTensorType>(program.getArgumentTypes()[i]);
      if (attr && (!strides || !type ||
                   !areDense(type.getShape(), strides.asArrayRef()) ||
                   llvm::is_contained(strides.asArrayRef(), 0)))
        return program.emitOpError("Program-15: expected dense strides of ")
               << program.getArgumentTypes()[i] << ", got: " << attr;
    }
    return success();
  }

  LogicalResult verifyEvaluation() {
    if (isInit)
      return program.emitOpError("Program-8: expected an evaluation to have a "
                                 "result, got none");
    auto module = dyn_cast_or_null<ModuleOp>(program->getParentOp());
    if (!module)
      return success();
    for (auto step : module.getOps<ProgramOp>())
      if (!step.getEvaluation() && !step.getResultTypes().empty() &&
          step.getArgumentTypes() != program.getArgumentTypes())
        return program.emitOpError("Program-8: expected the training step's "
                                   "arguments, ")
               << step.getFunctionType() << ", got "
               << program.getFunctionType();
    return success();
  }

  LogicalResult visitInEvaluation(Operation *op) {
    if (isa<PhaseOp, ReduceScatterOp, AllReduceOp, GradientsOp, NoGradientOp,
            OptimizerStepOp, OffloadActivationOp, MicrobatchesOp>(op))
      return op->emitOpError("Program-8: expected no such op in an evaluation");
    auto gather = dyn_cast<AllGatherOp>(op);
    auto reshard = dyn_cast<ReshardOp>(op);
    if ((gather && gather.getCondition()) ||
        (reshard && (reshard.getCondition() || reshard->getNumResults())))
      return op->emitOpError("Program-8: expected nothing to be kept in an "
                             "evaluation");
    return success();
  }

  /// Program-14: no gradient is lost.
  LogicalResult verifyGradients() {
    if (isInit || program.getEvaluation() ||
        (currentPhase.value_or(Phase::Forward) == Phase::Forward))
      return success();
    const auto &has = takesGradients ? taken : reduced;
    for (auto [name, param] : params)
      if (!param.getFrozen() && !withoutGradient.contains(name) &&
          !has.contains(name))
        return (program.emitOpError("Program-14: expected a gradient of @")
                << name.getValue()
                << ", which is not frozen, or an fsdp.no_gradient, found none")
                   .attachNote(param.getLoc())
               << "declared here";
    return success();
  }

  /// Program-9: what stays gathered for the next microbatch is used there.
  LogicalResult verifyMicrobatches() {
    for (auto &[unit, ops] : lives) {
      auto first = cast<AllGatherOp>(ops.front());
      AllGatherOp lastGather;
      for (Operation *op : ops) {
        if (auto gather = dyn_cast<AllGatherOp>(op))
          lastGather = gather;
        bool isEnd = op == first || (op == ops.back() && isa<ReshardOp>(op));
        Value condition = getCondition(op);
        if (condition &&
            (!isEnd ||
             condition != (op == first ? loop.getFirst() : loop.getLast())))
          return op->emitOpError(
                     "Program-9: expected the first gather of unit @")
                 << unit.getValue()
                 << " in the first microbatch and its last reshard in the "
                    "last, "
                    "and all others in every one";
      }
      auto last = dyn_cast<ReshardOp>(ops.back());
      if (bool(first.getCondition()) != (last && last.getCondition()))
        return first.emitOpError("Program-9: expected conditions of the first "
                                 "gather and of the last reshard of unit @")
               << unit.getValue() << " to go together, got one";
      if (failed(verifyKept(first, lastGather)))
        return failure();
    }
    return success();
  }

  /// Checks that `first` takes in later microbatches what `last` has gathered.
  LogicalResult verifyKept(AllGatherOp first, AllGatherOp last) {
    if (!first.getCondition())
      return success();
    ResultRange gathered = getResultsOp(last)->getResults();
    OperandRange carried = loop.getYield().getCarried();
    bool isWhole = first.getKept().size() <= gathered.size();
    for (auto [index, kept] : llvm::enumerate(first.getKept())) {
      auto argument = dyn_cast<BlockArgument>(kept);
      if (!isWhole || !argument || argument.getOwner() != loop.getBlock() ||
          carried[argument.getArgNumber() - loop.getInputs().size() - 2] !=
              gathered[index])
        return first.emitOpError(
            "Program-9: expected it to keep the results of "
            "the unit's last gather");
    }
    return success();
  }

  /// In the order of execution.
  LogicalResult visitBlock(Block &block) {
    for (Operation &op : block) {
      if (failed(visit(&op)))
        return failure();
      if (&op == loop && failed(visitBlock(*loop.getBlock())))
        return failure();
    }
    return success();
  }

  LogicalResult visit(Operation *op) {
    for (OpOperand &operand : op->getOpOperands())
      if (failed(verifyUse(operand)))
        return failure();
    if (failed(verifyAxis(op)) || failed(verifyWrites(op)) ||
        failed(verifyUnderWay(op)) || failed(verifyCondition(op)))
      return failure();
    if (auto write = dyn_cast<WriteParamOp>(op))
      return visitInit(op, write.getParamAttr());
    if (auto write = dyn_cast<WriteBufferOp>(op))
      return visitInit(op, write.getBufferAttr());
    if (isInit && !isa<aten::CallOp, FreeOp, ReturnOp>(op))
      return op->emitOpError("Program-7: expected no such op in a program "
                             "without a result");
    if (program.getEvaluation() && failed(visitInEvaluation(op)))
      return failure();
    if (auto phase = dyn_cast<PhaseOp>(op))
      return visitPhase(phase);
    if (isa<aten::CallOp, FusedOp>(op))
      return verifyPlace(op);
    if (failed(verifyPlace(op)) || failed(verifyPhase(op)) ||
        failed(verifyNames(op)))
      return failure();
    if (auto gather = dyn_cast<AllGatherOp>(op))
      return visitGather(gather);
    if (auto reshard = dyn_cast<ReshardOp>(op))
      return visitReshard(reshard);
    if (auto reduce = dyn_cast<ReduceScatterOp>(op))
      return visitGrads(op, reduce.getParamNames(), reduced, "reduced");
    if (auto reduce = dyn_cast<AllReduceOp>(op))
      return visitGrads(op, reduce.getParamNames(),
                        allReduced[reduce.getAxis()], "all-reduced");
    if (auto sum = dyn_cast<AccumulateOp>(op))
      return visitGrads(op, sum.getParamNames(), accumulated, "accumulated");
    if (auto unscale = dyn_cast<UnscaleOp>(op))
      return visitGrads(op, unscale.getParamNames(), unscaled, "unscaled");
    if (auto clip = dyn_cast<ClipGradNormOp>(op))
      return visitGrads(op, clip.getParamNames(), clipped, "clipped");
    if (auto gradients = dyn_cast<GradientsOp>(op))
      return visitGrads(op, gradients.getParamNames(), taken, "used");
    if (auto step = dyn_cast<OptimizerStepOp>(op))
      return visitGrads(op, step.getParamNames(), taken, "used");
    if (auto free = dyn_cast<FreeOp>(op)) {
      for (Value value : free.getValues())
        freed.try_emplace(value, op);
    } else if (auto offload = dyn_cast<OffloadActivationOp>(op)) {
      offloaded.try_emplace(offload.getValues().front(), op);
    }
    return success();
  }

  /// Program-10 and Program-11: futures, and what collectives in flight read.
  LogicalResult verifyUnderWay(Operation *op) {
    if (auto wait = dyn_cast<WaitOp>(op)) {
      Operation *begun = wait.getFuture().getDefiningOp();
      if (!underWay.contains(begun))
        return wait.emitOpError("Program-10: expected one wait for the future "
                                "of a collective, got a second");
      underWay.erase(begun);
      return success();
    }
    SmallVector<Value> ended;
    if (auto free = dyn_cast<FreeOp>(op))
      llvm::append_range(ended, free.getValues());
    if (auto call = dyn_cast<aten::CallOp>(op))
      for (int64_t operand : call.getMutates().value_or(ArrayRef<int64_t>()))
        ended.push_back(call.getOperand(operand));
    for (auto &[begun, read] : underWay)
      for (Value value : ended)
        if (isa<FreeOp>(op) ? read.values.contains(value)
                            : read.owners.contains(getStorageOwner(value)))
          return (op->emitOpError("Program-11: ")
                  << (isa<FreeOp>(op) ? "frees" : "writes")
                  << " what a collective in flight reads")
                     .attachNote(begun->getLoc())
                 << "begun here";
    if (auto collective = dyn_cast<CollectiveOpInterface>(op);
        collective && collective.hasFuture()) {
      Read &read = underWay[op];
      for (Value operand : op->getOperands()) {
        read.values.insert(operand); // which keeps the storage
        read.owners.insert(getStorageOwner(operand));
      }
    }
    return success();
  }

  /// Axis-2: what the model's own collectives are over.
  LogicalResult verifyAxis(Operation *op) const {
    auto call = dyn_cast<aten::CallOp>(op);
    auto collective = call ? getModelCollective(call) : std::nullopt;
    if (!collective)
      return success();
    std::string defect = ::fsdp::plan::findDefect(*collective, parallel);
    return defect.empty() ? success() : call.emitOpError("Axis-2: ") << defect;
  }

  /// Program-13: what a call writes is not the storage of a parameter.
  static LogicalResult verifyWrites(Operation *op) {
    auto call = dyn_cast<aten::CallOp>(op);
    if (!call)
      return success();
    for (int64_t operand : call.getMutates().value_or(ArrayRef<int64_t>())) {
      Value owner = getStorageOwner(call.getOperand(operand));
      std::string what;
      if (auto read = owner.getDefiningOp<ReadOp>())
        what = "parameter @" + read.getParam().str();
      else if (AllGatherOp gather = getGather(owner))
        what = "a parameter of unit @" + gather.getUnit().str();
      else
        continue;
      return (call.emitOpError("Program-13: writes the storage of ") << what)
                 .attachNote(owner.getLoc())
             << "read here";
    }
    return success();
  }

  /// Program-19: the results of an op that runs in one microbatch are used
  /// there.
  LogicalResult verifyCondition(Operation *op) {
    Value condition = getCondition(op);
    if (condition &&
        (!loop || op->getParentOp() != loop ||
         (condition != loop.getFirst() && condition != loop.getLast())))
      return op->emitOpError("Program-19: expected as its condition the first "
                             "or last microbatch of the loop that it is in");
    if (!condition || isa<AllGatherOp, FreeOp>(getProducerOf(op)))
      return success(); // a gather has results in every microbatch
    for (OpOperand &use : op->getUses()) {
      Operation *user = use.getOwner();
      if (isa<YieldOp>(user) ? !isCarried(use)
                             : getCondition(user) == condition)
        continue;
      return (user->emitOpError("Program-19: uses in every microbatch what is "
                                "made in only one")
                  .attachNote(op->getLoc())
              << "made here");
    }
    return success();
  }

  /// What a wait waits for; any other op itself.
  static Operation *getProducerOf(Operation *op) {
    if (auto wait = dyn_cast<WaitOp>(op))
      return wait.getFuture().getDefiningOp();
    return op;
  }

  /// Whether a microbatch leaves the operand to the next.
  static bool isCarried(OpOperand &use) {
    auto yield = dyn_cast<YieldOp>(use.getOwner());
    return yield && use.getOperandNumber() >= yield.getResults().size();
  }

  LogicalResult verifyUse(OpOperand &use) {
    Operation *op = use.getOwner();
    Value operand = use.get();
    // What ends with the last microbatch is there for the one before it.
    auto isOver = [&](Operation *end) {
      return !(isCarried(use) && getCondition(end));
    };
    if (auto it = freed.find(operand); it != freed.end() && isOver(it->second))
      return (op->emitOpError("Program-5: uses a value after its end")
                  .attachNote(it->second->getLoc())
              << "freed here");
    Value owner = getStorageOwner(operand);
    if (auto it = offloaded.find(owner);
        it != offloaded.end() && !isa<FreeOp>(op))
      return (op->emitOpError("Program-12: uses an activation on the device "
                              "that was copied to the host")
                  .attachNote(it->second->getLoc())
              << "offloaded here");
    AllGatherOp gather = getGather(owner);
    if (!gather)
      return success();
    auto it = resharded.find(gather);
    if (it == resharded.end() || isa<FreeOp>(op) || !isOver(it->second))
      return success();
    return (op->emitOpError("Program-2: uses a parameter of unit ")
            << gather.getUnitAttr() << " after its reshard")
               .attachNote(it->second->getLoc())
           << "resharded here";
  }

  LogicalResult visitPhase(PhaseOp phase) {
    if (currentPhase && phase.getPhase() <= *currentPhase)
      return phase.emitOpError(
                 "Program-1: expected phases in the order forward, "
                 "backward, optimizer, got ")
             << stringifyPhase(phase.getPhase()) << " after "
             << stringifyPhase(*currentPhase);
    currentPhase = phase.getPhase();
    if (loop && isa<MicrobatchesOp>(phase->getParentOp()) ==
                    (currentPhase == Phase::Optimizer))
      return phase.emitOpError(
          "Program-20: expected forward and backward in the "
          "loop over microbatches, the optimizer phase "
          "after it");
    if (currentPhase == Phase::Optimizer)
      for (auto [unit, gather] : liveGathers)
        return gather->emitOpError(
                   "Program-3: expected an fsdp.reshard of unit ")
               << gather.getUnitAttr()
               << " before the optimizer phase, found none";
    return success();
  }

  /// The parameters whose gradients an op takes or returns; null if there are
  /// none.
  static ArrayAttr getParamNames(Operation *op) {
    if (!op ||
        !isa<ReduceScatterOp, AllReduceOp, AccumulateOp, CopyToHostOp,
             UnscaleOp, ClipGradNormOp, GradientsOp, OptimizerStepOp>(op))
      return {};
    return cast<ArrayAttr>(*op->getInherentAttr("param_names"));
  }

  /// Program-18: a gradient stays that of its parameter.
  static LogicalResult verifyNames(Operation *op) {
    ArrayAttr names = getParamNames(op);
    if (!names)
      return success();
    for (auto [name, grad] : llvm::zip(names, op->getOperands())) {
      ArrayAttr given = getParamNames(getProducer(grad));
      auto result = dyn_cast<OpResult>(getYielded(grad));
      if (!given || !result || result.getResultNumber() >= given.size())
        continue; // the number is an invariant of the producer
      Attribute of = given[result.getResultNumber()];
      if (of != name)
        return op->emitOpError("Program-18: expected the gradient of ")
               << name << ", got that of " << of;
    }
    return success();
  }

  /// Program-20: what stands outside the loop runs once, in the optimizer
  /// phase.
  LogicalResult verifyPlace(Operation *op) {
    if (!loop || op == loop || op->getParentOp() != program)
      return success();
    bool isUpdating = currentPhase == Phase::Optimizer;
    if (isa<NoGradientOp, GradientsOp, FreeOp, ReturnOp>(op) ||
        (isUpdating && !isa<aten::CallOp, FusedOp>(op)))
      return success();
    return op->emitOpError("Program-20: expected it in the loop over "
                           "microbatches")
           << (isa<aten::CallOp, FusedOp>(op) ? ""
                                              : " or in the optimizer phase");
  }

  /// Program-17: what is only in the optimizer phase, and what is before it.
  LogicalResult verifyPhase(Operation *op) {
    if (!currentPhase)
      return success();
    bool isUpdating = *currentPhase == Phase::Optimizer;
    if (isa<AllGatherOp, ReduceScatterOp, AccumulateOp>(op) && isUpdating)
      return op->emitOpError("Program-17: expected it before the optimizer "
                             "phase, found it there");
    if (!isa<UnscaleOp, ClipGradNormOp, OptimizerStepOp>(op))
      return success();
    if (!isUpdating)
      return op->emitOpError("Program-17: expected it in the optimizer phase, "
                             "found it in ")
             << stringifyPhase(*currentPhase);
    int rank = isa<UnscaleOp>(op) ? 0 : isa<ClipGradNormOp>(op) ? 1 : 2;
    if (rank < lastUpdate)
      return op->emitOpError("Program-17: expected the order fsdp.unscale, "
                             "fsdp.clip_grad_norm, fsdp.optimizer_step");
    lastUpdate = rank;
    return success();
  }

  LogicalResult visitGather(AllGatherOp gather) {
    auto [it, inserted] =
        liveGathers.try_emplace(gather.getUnitAttr().getAttr(), gather);
    if (!inserted)
      return (gather.emitOpError("Program-3: gathers unit ")
              << gather.getUnitAttr() << ", which is gathered already")
                 .attachNote(it->second->getLoc())
             << "gathered here";
    lives[gather.getUnitAttr().getAttr()].push_back(gather);
    return success();
  }

  LogicalResult visitReshard(ReshardOp reshard) {
    // Reshard-1, which proves that the operands are one gather's results, is
    // checked before regions are.
    AllGatherOp gather = getGather(reshard.getParams().front());
    liveGathers.erase(gather.getUnitAttr().getAttr());
    resharded[gather] = reshard;
    lives[gather.getUnitAttr().getAttr()].push_back(reshard);
    return success();
  }

  LogicalResult visitGrads(Operation *op, ArrayAttr names,
                           llvm::DenseMap<StringAttr, Operation *> &seen,
                           StringRef done) {
    for (auto name : names.getAsRange<FlatSymbolRefAttr>())
      if (failed(visitGrad(op, name, seen, done)))
        return failure();
    return success();
  }

  LogicalResult visitGrad(Operation *op, FlatSymbolRefAttr name,
                          llvm::DenseMap<StringAttr, Operation *> &seen,
                          StringRef done) {
    auto [it, inserted] = seen.try_emplace(name.getAttr(), op);
    if (!inserted)
      return (op->emitOpError("Program-4: expected the gradient of ")
              << name << " to be " << done << " at most once")
                 .attachNote(it->second->getLoc())
             << done << " here";
    ParamOp param = params.lookup(name.getAttr());
    if (param && param.getFrozen())
      return op->emitOpError("Program-6: expected no gradient for ")
             << name << ", which is frozen";
    if (withoutGradient.contains(name.getAttr()))
      return op->emitOpError("Program-6: expected no gradient for ")
             << name << ", which an fsdp.no_gradient names";
    return success();
  }

  LogicalResult visitInit(Operation *op, FlatSymbolRefAttr name) {
    if (!isInit)
      return op->emitOpError("Program-7: expected writes of parameters and "
                             "buffers in a program without a result only");
    auto [it, inserted] = initialised.try_emplace(name.getAttr(), op);
    if (!inserted)
      return (op->emitOpError("Program-7: expected ")
              << name << " to be written at most once")
                 .attachNote(it->second->getLoc())
             << "written here";
    return success();
  }

  ProgramOp program;
  MicrobatchesOp loop; ///< null where there is but one microbatch
  bool takesGradients = false;
  bool isInit;
  std::optional<::fsdp::plan::ModelParallel> parallel;
  llvm::MapVector<StringAttr, ParamOp> params;
  std::optional<Phase> currentPhase;
  int lastUpdate = 0; ///< the place of the last op of the update in its order
  llvm::MapVector<StringAttr, AllGatherOp> liveGathers;
  /// Per unit: its gathers and reshards, in order.
  llvm::MapVector<StringAttr, SmallVector<Operation *>> lives;
  llvm::DenseMap<Operation *, Operation *> resharded;
  /// By parameter; `taken` by the gradients' op or by the update.
  llvm::DenseMap<StringAttr, Operation *> reduced, accumulated, unscaled,
      clipped, taken, initialised;
  llvm::StringMap<llvm::DenseMap<StringAttr, Operation *>> allReduced; ///< axis
  llvm::DenseSet<StringAttr> withoutGradient;
  llvm::DenseMap<Value, Operation *> freed;
  /// By the value that owns the storage.
  llvm::DenseMap<Value, Operation *> offloaded;
  /// Collectives begun and not awaited, with what they read.
  /// What a collective reads, and whose storages these are.
  struct Read {
    llvm::DenseSet<Value> values, owners;
  };
  llvm::MapVector<Operation *, Read> underWay;
};
} // namespace

LogicalResult ProgramOp::verifyRegions() {
  return ProgramVerifier(*this).run();
}
