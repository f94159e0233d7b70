//===- InsertAccumulation.cpp - add the gradients of the microbatches -----===//
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
    if (!program || failed(scaleLoss(program, policy.getSteps())))
      return signalPassFailure();
    if (!policy.getReduceEachMicrobatch())
      accumulateWhole(module, program);
    else if (!policy.getAllReduceEachMicrobatch() &&
             !program.getOps<AllReduceOp>().empty())
      accumulatePartial(program);
    else
      return addAtEnd(program, /*shards=*/true);
    addAtEnd(program, /*shards=*/false);
  }

private:
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

  /// Adds the gradients of ignored parameters, with `shards` all gradients, at
  /// the end of backward, when all reductions are under way.
  static void addAtEnd(ProgramOp program, bool shards) {
    StepGradients gradients(program, [&](ParamOp param, Value grad) {
      return shards || !isShard(param, grad);
    });
    if (gradients.empty())
      return;
    OpBuilder builder(getStepEnd(program));
    auto sums = createFor<AccumulateOp>(
        gradients.getValues().front(), builder, gradients.getTypes(),
        gradients.getNames(), gradients.getValues());
    gradients.replaceWith(sums.getSums());
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

  /// Whole gradients are added on each rank; the sums are reduced.
  static void accumulateWhole(ModuleOp module, ProgramOp program) {
    for (auto reduce : program.getOps<ReduceScatterOp>()) {
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
      auto sums = createFor<AccumulateOp>(reduce, builder, types,
                                          reduce.getParamNamesAttr(),
                                          reduce.getGrads());
      reduce.getGradsMutable().assign(sums.getSums());
      reduce.setLastMicrobatch(true);
    }
    for (auto reduce : program.getOps<AllReduceOp>())
      reduce.setLastMicrobatch(true);
    for (auto copy : program.getOps<CopyToHostOp>())
      copy.setLastMicrobatch(true);
  }

  /// The results of the reduce-scatters are added at the end of backward; the
  /// sums are all-reduced.
  static void accumulatePartial(ProgramOp program) {
    auto copies = program.getOps<CopyToHostOp>();
    Operation *end =
        copies.empty() ? getStepEnd(program) : (*copies.begin()).getOperation();
    auto reductions = llvm::to_vector(program.getOps<AllReduceOp>());
    SmallVector<Attribute> names;
    SmallVector<Value> shards;
    for (AllReduceOp reduce : reductions) {
      llvm::append_range(names, reduce.getParamNames());
      llvm::append_range(shards, reduce.getGrads());
    }
    OpBuilder builder(end);
    SmallVector<Type> types(ValueRange(shards).getTypes());
    auto partial = createFor<AccumulateOp>(reductions.front(), builder, types,
                                           builder.getArrayAttr(names), shards);
    ValueRange sums = partial.getSums();
    for (AllReduceOp reduce : reductions) {
      size_t count = reduce.getGrads().size();
      reduce.getGradsMutable().assign(sums.take_front(count));
      sums = sums.drop_front(count);
      reduce.setLastMicrobatch(true);
      reduce->moveBefore(end);
    }
    for (CopyToHostOp copy : copies)
      copy.setLastMicrobatch(true);
  }
};
} // namespace
