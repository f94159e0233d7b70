//===- InsertAccumulation.cpp - the loop over microbatches ----------------===//
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/StepGradients.h"
#include "fsdp/Transforms/StepProgram.h"

#include "mlir/IR/TypeUtilities.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_INSERTACCUMULATION
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;

namespace {
struct InsertAccumulation
    : mlir::fsdp::impl::InsertAccumulationBase<InsertAccumulation> {
  void runOnModule() override {
    ModuleOp module = getOperation();
    auto policies = module.getOps<AccumulationOp>();
    if (policies.empty())
      return;
    AccumulationOp policy = *policies.begin();
    if (policy.getSteps() == 1)
      return;
    ProgramOp program = getProgram(module);
    if (!program || failed(verifyPlace(program)) ||
        failed(scaleLoss(program, policy.getSteps())))
      return signalPassFailure();
    bool addsPartial = !policy.getAllReduceEachMicrobatch() &&
                       !program.getOps<AllReduceOp>().empty();
    if ((addsPartial || !policy.getReduceEachMicrobatch()) &&
        failed(verifyCallsOfUnits(module)))
      return signalPassFailure();
    loop = formLoop(program, policy.getSteps());
    if (!policy.getReduceEachMicrobatch())
      accumulateWhole(module);
    else if (addsPartial)
      accumulatePartial();
    else
      return addAtEnd(program, /*shards=*/true);
    addAtEnd(program, /*shards=*/false);
  }

private:
  /// There is one loop, of what comes before the optimizer phase.
  static LogicalResult verifyPlace(ProgramOp program) {
    if (getMicrobatches(program))
      return program.emitOpError("expected no fsdp.microbatches yet: "
                                 "fsdp-insert-accumulation runs once");
    for (auto phase : program.getOps<PhaseOp>())
      if (phase.getPhase() == Phase::Optimizer)
        return phase.emitOpError("expected no optimizer phase yet: "
                                 "fsdp-insert-accumulation runs before the "
                                 "passes that insert its ops");
    return success();
  }

  /// Behind the first call of a unit in the last microbatch, FSDP2 reduces the
  /// sums of those before, also of gradients that are not whole there.
  static LogicalResult verifyCallsOfUnits(ModuleOp module) {
    for (auto param : module.getOps<ParamOp>())
      if (param.getUnit() && param.getPostBackward())
        return param.emitError("unit \"")
               << *param.getUnit()
               << "\" is called several times in a step, or its parameters are "
                  "used elsewhere: FSDP2 reduces what microbatches add up "
                  "apart from the gradients of the last one; expected "
                  "\"reduce_each_microbatch\" and "
                  "\"all_reduce_each_microbatch\" to be true";
    return success();
  }

  /// `(loss / steps).backward()`: autograd divides the 1 that it begins with.
  static LogicalResult scaleLoss(ProgramOp program, int64_t steps) {
    aten::CallOp call = getBackwardSeed(program, "accumulation scales it");
    if (!call)
      return failure();
    OpBuilder builder(program.getContext());
    builder.setInsertionPointAfter(call);
    Value one = call.getResult(0);
    auto scaled = createFor<aten::CallOp>(
        call, builder, one.getType(), "aten::div.Scalar",
        ArrayRef<OpFoldResult>{one, builder.getI64IntegerAttr(steps)});
    one.replaceAllUsesExcept(scaled.getResult(0), scaled);
    return success();
  }

  /// Moves forward and backward into a loop, which gives the loss and what the
  /// program's `fsdp.gradients` takes.
  static MicrobatchesOp formLoop(ProgramOp program, int64_t steps) {
    Block &outside = program.getBody().front();
    auto end = cast<ReturnOp>(outside.getTerminator());
    GradientsOp gradients = getGradients(program);
    SmallVector<Value> results = {end.getLoss()};
    if (gradients)
      llvm::append_range(results, gradients.getGrads());

    OpBuilder builder(getBackwardEnd(program));
    auto loop = MicrobatchesOp::create(builder, program.getLoc(),
                                       TypeRange(ValueRange(results)),
                                       uint64_t(steps), outside.getArguments());
    Block &body = loop.getBody().emplaceBlock();
    for (BlockArgument input : outside.getArguments())
      input.replaceAllUsesExcept(
          body.addArgument(input.getType(), input.getLoc()), loop);
    for (int flag = 0; flag < 2; ++flag)
      body.addArgument(builder.getI1Type(), program.getLoc());
    for (Operation &op : llvm::make_early_inc_range(outside)) {
      if (&op == loop)
        break;
      if (!isa<NoGradientOp>(op))
        op.moveBefore(&body, body.end());
    }
    builder.setInsertionPointToEnd(&body);
    YieldOp::create(builder, program.getLoc(), results, ValueRange());
    end.getLossMutable().assign(loop.getResult(0));
    if (gradients)
      gradients.getGradsMutable().assign(loop.getResults().drop_front());
    return loop;
  }

  /// Adds `grads` to what the microbatches before have left.
  AccumulateOp accumulate(Origin origin, OpBuilder &builder, ArrayAttr names,
                          ValueRange grads, TypeRange types) {
    SmallVector<Value> before;
    for (Type type : types)
      before.push_back(loop.getBlock()->addArgument(
          CarriedType::get(&getContext(), type), origin.loc));
    auto sums =
        createFor<AccumulateOp>(origin, builder, types, names, grads, before);
    loop.getYield().getCarriedMutable().append(sums.getSums());
    return sums;
  }

  /// Adds the gradients of ignored parameters, with `shards` all gradients, at
  /// the end of backward, when all reductions are under way.
  void addAtEnd(ProgramOp program, bool shards) {
    GradientsOp gradients = getGradients(program);
    if (!gradients)
      return;
    YieldOp yield = loop.getYield();
    SmallVector<Attribute> names;
    SmallVector<unsigned> yielded; ///< operands
    SmallVector<Value> grads;
    for (auto [name, grad] :
         llvm::zip(gradients.getParamNames(), gradients.getGrads())) {
      if (!shards && isa<ShardedType>(grad.getType()))
        continue;
      names.push_back(name);
      yielded.push_back(cast<OpResult>(grad).getResultNumber());
      grads.push_back(yield.getResults()[yielded.back()]);
    }
    if (names.empty())
      return;
    OpBuilder builder(yield);
    AccumulateOp sums =
        accumulate(grads.front(), builder, builder.getArrayAttr(names), grads,
                   ValueRange(grads).getTypes());
    for (auto [operand, sum] : llvm::zip(yielded, sums.getSums()))
      yield->setOperand(operand, sum);
  }

  /// FSDP2 adds the gradients of a parameter's uses in the dtype of the sum,
  /// but only in the first microbatch; the program has one addition for all.
  static void warnOfRounding(ParamOp param, Value grad, Type sum) {
    auto call = grad.getDefiningOp<aten::CallOp>();
    if (grad.getType() == sum || !call ||
        call.getCallee() != "aten::add.Tensor")
      return;
    param.emitWarning("used more than once: \"")
        << param.getSymName() << "\": FSDP2 adds the gradients of its uses in "
        << getElementTypeOrSelf(sum) << " in the first microbatch, here in "
        << getElementTypeOrSelf(grad)
        << "; the sums differ by rounding where \"reduce_each_microbatch\" is "
           "false";
  }

  /// Lets all ops of a kind run in the last microbatch alone.
  template <typename OpT> void runInLast() {
    for (auto op : loop.getOps<OpT>())
      op.getConditionMutable().assign(loop.getLast());
  }

  /// Whole gradients are added on each rank; the sums are reduced.
  void accumulateWhole(ModuleOp module) {
    for (auto reduce : loop.getOps<ReduceScatterOp>()) {
      OpBuilder builder(reduce);
      auto unit = module.lookupSymbol<UnitOp>(reduce.getUnitAttr());
      SmallVector<Type> types;
      for (auto [name, grad] :
           llvm::zip(reduce.getParamNames().getAsRange<FlatSymbolRefAttr>(),
                     reduce.getGrads())) {
        auto param = module.lookupSymbol<ParamOp>(name);
        types.push_back(getAccumulatedType(param, unit));
        warnOfRounding(param, grad, types.back());
      }
      AccumulateOp sums =
          accumulate(reduce, builder, reduce.getParamNamesAttr(),
                     reduce.getGrads(), types);
      reduce.getGradsMutable().assign(sums.getSums());
    }
    runInLast<ReduceScatterOp>();
    runInLast<AllReduceOp>();
    runInLast<CopyToHostOp>();
  }

  /// The results of the reduce-scatters are added at the end of backward; the
  /// sums are all-reduced.
  void accumulatePartial() {
    auto copies = loop.getOps<CopyToHostOp>();
    Operation *end = copies.empty() ? loop.getYield().getOperation()
                                    : (*copies.begin()).getOperation();
    auto reductions = llvm::to_vector(loop.getOps<AllReduceOp>());
    SmallVector<Attribute> names;
    SmallVector<Value> shards;
    for (AllReduceOp reduce : reductions) {
      llvm::append_range(names, reduce.getParamNames());
      llvm::append_range(shards, reduce.getGrads());
    }
    OpBuilder builder(end);
    AccumulateOp partial =
        accumulate(reductions.front(), builder, builder.getArrayAttr(names),
                   shards, ValueRange(shards).getTypes());
    ValueRange sums = partial.getSums();
    for (AllReduceOp reduce : reductions) {
      size_t count = reduce.getGrads().size();
      reduce.getGradsMutable().assign(sums.take_front(count));
      sums = sums.drop_front(count);
      reduce->moveBefore(end);
    }
    runInLast<AllReduceOp>();
    runInLast<CopyToHostOp>();
  }

  MicrobatchesOp loop;
};
} // namespace
