//===- InsertReduceScatters.cpp - reduce a unit's gradients together ------===//
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/StepGradients.h"
#include "fsdp/Transforms/StepProgram.h"

#include "llvm/ADT/MapVector.h"

#include <cmath>
#include <map>

namespace mlir::fsdp {
#define GEN_PASS_DEF_INSERTREDUCESCATTERS
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;

/// The dtype that holds every value of both floating-point dtypes.
static Type promote(Type a, Type b) {
  if (a == b)
    return a;
  if (a.isF64() || b.isF64())
    return Float64Type::get(a.getContext());
  return Float32Type::get(a.getContext());
}

/// PyTorch's kernels round the quotient of a complex number by its place in
/// FSDP2's flat tensor, unless it is exact.
static bool isExactDivision(double divisor) {
  int exponent;
  return std::frexp(divisor, &exponent) == 0.5;
}

/// The dtype of the reduction: the unit's `reduce_dtype`, else that of the
/// parameters themselves or of their gradients (reducesInParamDType). And
/// FSDP2's way to average in it
/// (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py,
/// _get_gradient_divide_factors): fp32 and bf16 have the range for a plain
/// average, or a product with the reciprocal of the user's factor before the
/// sum; other dtypes divide by about the root of the divisor before the sum and
/// by the rest after it.
static LogicalResult setReduction(ReduceScatterOp reduce, UnitOp unit,
                                  int64_t ranks, int64_t shards) {
  MixedPrecisionAttr policy = unit.getMixedPrecisionAttr();
  Type dtype;
  bool byParam = reducesInParamDType(unit);
  for (auto [grad, shard] : llvm::zip(reduce.getGrads(), reduce.getShards())) {
    Type own =
        byParam
            ? cast<ShardedType>(shard.getType()).getTensor().getElementType()
            : getElementTypeOrSelf(grad.getType());
    if (!byParam && dtype && own != dtype)
      return reduce.emitError("expected gradients of one dtype in unit ")
             << reduce.getUnitAttr() << ", as FSDP2 does before PyTorch 2.15, "
             << "got: " << dtype << " and " << own;
    dtype = dtype ? promote(dtype, own) : own;
  }
  if (policy && policy.getReduceDtype())
    dtype = policy.getReduceDtype();
  bool casts = llvm::any_of(reduce.getGrads(), [&](Value grad) {
    return cast<RankedTensorType>(grad.getType()).getElementType() != dtype;
  });
  if (casts || policy)
    reduce.setReduceDtype(dtype);
  auto setSum = [&](double before, double after) {
    reduce.setKind(ReduceKind::Sum);
    reduce.setPredivide(APFloat(before));
    reduce.setPostdivide(APFloat(after));
    return success();
  };
  GradientDivisionAttr division = unit.getGradientDivisionAttr();
  std::optional<double> factor;
  if (division && division.getFactor())
    factor = division.getFactor().getValueAsDouble();
  bool ranged = isa<Float32Type, BFloat16Type>(dtype);
  if (ranged && !(division && division.getForceSum())) {
    if (!factor || *factor == double(shards))
      return success();
    // FSDP2 does not reduce over one shard: it divides.
    if (shards == 1)
      return setSum(*factor, 1);
    reduce.setKind(ReduceKind::Sum);
    reduce.setPremultiply(APFloat(1 / *factor));
    return success();
  }
  double divisor = factor.value_or(double(ranks)), before = 1;
  while (!ranged && std::fmod(divisor, before) == 0 &&
         divisor / before > before)
    before *= 2;
  double after = divisor / before;
  // Over one shard FSDP2 divides by a factor of the user's once more.
  if (factor && shards == 1 && *factor != 1) {
    if (before != 1)
      return unit.emitError("a gradient_divide_factor on one shard with "
                            "the reduction's dtype ")
             << dtype << " is not supported yet, got: " << *factor;
    before = *factor;
  }
  if (isa<ComplexType>(dtype) &&
      !(isExactDivision(before) && isExactDivision(after)))
    return reduce.emitError("the average of complex gradients over ")
           << ranks
           << " ranks is not supported: expected a number of ranks, and a "
              "gradient_divide_factor, that are powers of 2";
  return setSum(before, after);
}

/// The axes along which a reduce-scatter leaves the gradients partial: that of
/// HSDP's replicas. FSDP2 adds what it does not all-reduce yet in the dtype of
/// the reduction, over one replica too.
static SmallVector<Attribute> getPartialAxes(ModuleOp module, MeshAttr mesh) {
  std::optional<int64_t> replicas = mesh.getAxisSize(replicateAxisName);
  bool addsPartial =
      llvm::any_of(module.getOps<AccumulationOp>(), [](AccumulationOp op) {
        return op.getSteps() > 1 && op.getReduceEachMicrobatch() &&
               !op.getAllReduceEachMicrobatch();
      });
  if (replicas.value_or(0) < (addsPartial ? 1 : 2))
    return {};
  return {StringAttr::get(module.getContext(), replicateAxisName)};
}

namespace {
struct InsertReduceScatters
    : mlir::fsdp::impl::InsertReduceScattersBase<InsertReduceScatters> {
  void runOnModule() override {
    ModuleOp module = getOperation();
    ProgramOp program = getProgram(module);
    if (!program)
      return signalPassFailure();
    for (auto mesh : module.getOps<MeshOp>()) {
      ranks = mesh.getMesh().getNumRanks();
      shards = mesh.getMesh().getAxisSize(shardAxisName).value_or(1);
      partial = getPartialAxes(module, mesh.getMesh());
    }
    for (auto &[unit, params] : getUnitParams(module))
      for (auto &[calls, together] : splitByPostBackward(params))
        if (failed(
                reduce(program, module.lookupSymbol<UnitOp>(unit), together)))
          return signalPassFailure();
  }

private:
  /// FSDP2 reduces behind each call of a unit what is whole there.
  static std::map<int64_t, SmallVector<ParamOp>>
  splitByPostBackward(ArrayRef<ParamOp> params) {
    std::map<int64_t, SmallVector<ParamOp>> parts;
    for (ParamOp param : params)
      parts[param.getPostBackward().value_or(0)].push_back(param);
    return parts;
  }

  LogicalResult reduce(ProgramOp program, UnitOp unit,
                       ArrayRef<ParamOp> params) {
    StepGradients gradients(program, params, [](ParamOp, Value grad) {
      return isa<RankedTensorType>(grad.getType());
    });
    if (gradients.empty())
      return success();
    SmallVector<Type> types;
    for (ParamOp param : gradients.getParams()) {
      if (!param.getSharding())
        return param.emitError("expected a sharding: run fsdp-place-params "
                               "first");
      types.push_back(param.getShardedType());
    }
    OpBuilder builder = gradients.getBuilder();
    // Behind what the same op ends: the use of parameters, as FSDP2 reshards
    // before it reduces, and the gradients of units before this one.
    while (isa<ReshardOp, ReduceScatterOp>(*builder.getInsertionPoint()))
      builder.setInsertionPointAfter(&*builder.getInsertionPoint());
    auto reduce = createFor<ReduceScatterOp>(
        gradients.getLast(), builder, types, unit.getSymName(), ReduceKind::Avg,
        gradients.getNames(), gradients.getValues(), TypeAttr(), FloatAttr(),
        FloatAttr(), FloatAttr(),
        /*condition=*/Value(), /*buffer=*/Value());
    if (failed(setReduction(reduce, unit, ranks, shards)))
      return failure();
    for (auto [param, grad, shard] : llvm::zip(
             gradients.getParams(), reduce.getGrads(), reduce.getShards())) {
      Type dtype = cast<RankedTensorType>(grad.getType()).getElementType();
      shard.setType(ParamOp(param).getPartialType(
          partial, reduce.getReduceDtype().value_or(dtype)));
    }
    gradients.replaceWith(reduce.getShards());
    return success();
  }

  int64_t ranks = 1, shards = 1;
  SmallVector<Attribute> partial; ///< axes
};
} // namespace
