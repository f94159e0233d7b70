//===- CollectiveOps.cpp - verifiers of gathers and reductions ------------===//
#include "SymbolChecks.h"

#include <cmath>

using namespace mlir;
using namespace mlir::fsdp;

LogicalResult AllGatherOp::verify() {
  size_t results = getAwaitedTypes().size();
  if (getShards().empty())
    return emitOpError("AllGather-1: expected the parameters of a unit, got "
                       "none");
  if (getShards().size() != results)
    return emitOpError("AllGather-2: expected ")
           << getShards().size() << " results, got: " << results;
  SmallVector<Type> kept;
  if (getCondition())
    for (Type type : getAwaitedTypes())
      kept.push_back(CarriedType::get(getContext(), type));
  if (TypeRange(kept) != getKept().getTypes())
    return emitOpError("AllGather-3: expected a condition, and to keep ")
           << getAwaitedTypes()
           << ", or neither, got: " << getKept().getTypes();
  return success();
}

LogicalResult AllGatherOp::verifySymbolUses(SymbolTableCollection &symbols) {
  auto unit = lookup<UnitOp>(symbols, *this, getUnitAttr(), "AllGather-1");
  if (!unit)
    return failure();
  MixedPrecisionAttr policy = unit.getMixedPrecisionAttr();
  for (auto [shard, type] : llvm::zip(getShards(), getAwaitedTypes())) {
    RankedTensorType expected = cast<ShardedType>(shard.getType()).getTensor();
    if (policy)
      expected =
          expected.clone(policy.getComputeDtype(expected.getElementType()));
    if (type != expected)
      return emitOpError("AllGather-2: expected a result of ")
             << expected << ", got: " << type;
  }
  if (!getShards().empty())
    if (auto kept = getShards().front().getDefiningOp<ReshardOp>()) {
      if (kept.getUnitAttr() == getUnitAttr() &&
          llvm::equal(kept.getKept(), getShards()))
        return success();
      return emitOpError("AllGather-1: expected all results of one "
                         "fsdp.reshard of unit ")
             << getUnitAttr() << ", in order";
    }
  SmallVector<StringRef> read;
  for (Value shard : getShards()) {
    if (auto copy = shard.getDefiningOp<CopyToDeviceOp>())
      shard = copy.getShards()[cast<OpResult>(shard).getResultNumber()];
    auto op = shard.getDefiningOp<ReadOp>();
    if (!op)
      return emitOpError("AllGather-1: expected operands that are fsdp.read, "
                         "or copies of it, got: ")
             << shard;
    read.push_back(op.getParam());
  }
  auto module = (*this)->getParentOfType<ModuleOp>();
  size_t next = 0;
  for (auto param : module.getOps<ParamOp>()) {
    if (param.getUnitAttr() != getUnitAttr())
      continue;
    if (next == read.size() || read[next] != param.getSymName())
      return emitOpError("AllGather-1: expected @")
             << param.getSymName() << " as operand " << next << " of unit "
             << getUnitAttr() << ", got: "
             << (next < read.size() ? ("@" + read[next]).str() : "none");
    ++next;
  }
  if (next != read.size())
    return emitOpError("AllGather-1: expected ")
           << next << " parameters in unit " << getUnitAttr()
           << ", got: " << read.size();
  return success();
}

LogicalResult ReshardOp::verify() {
  auto gather =
      getParams().empty() ? AllGatherOp() : getGather(getParams().front());
  if (!gather || !llvm::equal(getParams().front().getDefiningOp()->getResults(),
                              getParams()))
    return emitOpError(
        "Reshard-1: expected all results of one fsdp.all_gather, in order");
  if (gather.getUnitAttr() != getUnitAttr())
    return emitOpError("Reshard-1: expected unit ")
           << gather.getUnitAttr()
           << ", like its gather, got: " << getUnitAttr();
  return success();
}

LogicalResult ReshardOp::verifySymbolUses(SymbolTableCollection &symbols) {
  auto unit = lookup<UnitOp>(symbols, *this, getUnitAttr(), "Reshard-1");
  if (!unit)
    return failure();
  if (getKept().empty())
    return success();
  std::optional<int64_t> size = unit.getPostForwardSize();
  size_t expected = size ? getParams().size() : 0;
  if (getKept().size() != expected)
    return emitOpError("Reshard-2: expected ")
           << expected << " results, got: " << getKept().size();
  auto module = (*this)->getParentOfType<ModuleOp>();
  auto members =
      llvm::make_filter_range(module.getOps<ParamOp>(), [&](ParamOp param) {
        return param.getUnitAttr() == getUnitAttr();
      });
  for (auto [param, value, kept] : llvm::zip(members, getParams(), getKept())) {
    ShardingAttr sharding = param.getShardingAttr();
    if (!sharding)
      return emitOpError("Reshard-2: expected @")
             << param.getSymName() << " to have a sharding, it has none";
    auto type =
        ShardedType::get(getContext(), cast<RankedTensorType>(value.getType()),
                         sharding.getSubAxis(*size));
    if (kept.getType() != type)
      return emitOpError("Reshard-2: expected ")
             << type << " for @" << param.getSymName()
             << ", got: " << kept.getType();
    auto mesh = lookup<MeshOp>(symbols, *this, sharding.getMesh(), "Param-2");
    if (!mesh)
      return failure();
    int64_t ranks = mesh.getMesh().getAxisSize(shardAxisName).value_or(1);
    if (*size >= ranks || ranks % *size != 0)
      return emitOpError("Reshard-2: expected a post_forward_size that divides "
                         "the ")
             << ranks << " ranks of axis \"" << shardAxisName
             << "\" and is less than that, got: " << *size;
  }
  return success();
}

/// Checks that a divisor, if there is one, is positive and goes with `sum`.
static LogicalResult verifyDivisor(Operation *op, ReduceKind kind,
                                   FloatAttr divisor, StringRef label) {
  if (!divisor)
    return success();
  double value = divisor.getValueAsDouble();
  if (!std::isfinite(value) || value <= 0)
    return op->emitOpError(label)
           << ": expected a positive divisor, got: " << divisor;
  if (kind != ReduceKind::Sum)
    return op->emitOpError(label) << ": expected divisors with sum only, got: "
                                  << stringifyReduceKind(kind);
  return success();
}

/// Checks ReduceScatter-4.
static LogicalResult verifyReduction(ReduceScatterOp reduce, UnitOp unit) {
  if (MixedPrecisionAttr policy = unit.getMixedPrecisionAttr();
      policy && policy.getReduceDtype() &&
      policy.getReduceDtype() != reduce.getReduceDtype().value_or(Type()))
    return reduce.emitOpError("ReduceScatter-4: expected reduce_dtype ")
           << policy.getReduceDtype() << " as unit " << reduce.getUnitAttr()
           << " says";
  for (FloatAttr divisor :
       {reduce.getPredivideAttr(), reduce.getPostdivideAttr(),
        reduce.getPremultiplyAttr()})
    if (failed(verifyDivisor(reduce, reduce.getKind(), divisor,
                             "ReduceScatter-4")))
      return failure();
  return success();
}

/// Checks ReduceScatter-3.
static LogicalResult verifyReduced(SymbolTableCollection &symbols,
                                   ReduceScatterOp reduce, ParamOp param,
                                   Type reduced, Type result) {
  ShardingAttr sharding = param.getShardingAttr();
  if (!sharding)
    return reduce.emitOpError("ReduceScatter-3: expected @")
           << param.getSymName() << " to have a sharding, it has none";
  auto mesh = lookup<MeshOp>(symbols, reduce, sharding.getMesh(), "Param-2");
  if (!mesh)
    return failure();
  auto sharded = dyn_cast<ShardedType>(result);
  SmallVector<Attribute> axes;
  for (MeshAxisAttr axis : mesh.getMesh().getAxes()) {
    StringRef name = axis.getName();
    bool isPartial = sharded && sharded.getSharding().isPartialAlong(name);
    if (!sharding.isShardedOver(name) && (axis.getSize() > 1 || isPartial))
      axes.push_back(StringAttr::get(reduce.getContext(), name));
  }
  ShardedType expected = param.getPartialType(axes, reduced);
  if (result == expected)
    return success();
  return reduce.emitOpError("ReduceScatter-3: expected ")
         << expected << " for @" << param.getSymName() << ", got: " << result;
}

LogicalResult
ReduceScatterOp::verifySymbolUses(SymbolTableCollection &symbols) {
  auto unit = lookup<UnitOp>(symbols, *this, getUnitAttr(), "ReduceScatter-1");
  if (!unit || failed(verifyReduction(*this, unit)))
    return failure();
  SmallVector<Type> shards = getAwaitedTypes();
  if (getParamNames().empty())
    return emitOpError("ReduceScatter-1: expected parameters, got none");
  if (getParamNames().size() != getGrads().size() ||
      getParamNames().size() != shards.size())
    return emitOpError("ReduceScatter-1: expected ")
           << getParamNames().size()
           << " operands and results, got: " << getGrads().size() << " and "
           << shards.size();
  Operation *previous = nullptr;
  for (auto [nameAttr, grad, shard] :
       llvm::zip(getParamNames(), getGrads(), shards)) {
    auto name = cast<FlatSymbolRefAttr>(nameAttr);
    auto param = lookup<ParamOp>(symbols, *this, name, "ReduceScatter-1");
    if (!param)
      return failure();
    if (param.getUnitAttr() != getUnitAttr())
      return emitOpError("ReduceScatter-1: expected ")
             << name << " in unit " << getUnitAttr();
    if (previous && !previous->isBeforeInBlock(param))
      return emitOpError("ReduceScatter-1: expected parameters in unit order, "
                         "got ")
             << name << " too late";
    previous = param;
    RankedTensorType type =
        getCondition() ? getAccumulatedType(param, unit) : param.getGradType();
    if (grad.getType() != type)
      return emitOpError("ReduceScatter-2: expected ")
             << type << " for " << name << ", got: " << grad.getType();
    if (failed(verifyReduced(symbols, *this, param,
                             getReduceDtype().value_or(type.getElementType()),
                             shard)))
      return failure();
  }
  return success();
}

LogicalResult AllReduceOp::verifySymbolUses(SymbolTableCollection &symbols) {
  if (!lookup<UnitOp>(symbols, *this, getUnitAttr(), "AllReduce-1") ||
      failed(
          verifyDivisor(*this, getKind(), getPostdivideAttr(), "AllReduce-4")))
    return failure();
  SmallVector<Type> results = getAwaitedTypes();
  if (getParamNames().empty())
    return emitOpError("AllReduce-1: expected parameters, got none");
  if (getParamNames().size() != getGrads().size() ||
      getParamNames().size() != results.size())
    return emitOpError("AllReduce-1: expected ")
           << getParamNames().size()
           << " operands and results, got: " << getGrads().size() << " and "
           << results.size();
  Operation *previous = nullptr;
  for (auto [nameAttr, grad, reduced] :
       llvm::zip(getParamNames(), getGrads(), results)) {
    auto name = cast<FlatSymbolRefAttr>(nameAttr);
    auto param = lookup<ParamOp>(symbols, *this, name, "AllReduce-1");
    if (!param)
      return failure();
    if (param.getUnitAttr() != getUnitAttr())
      return emitOpError("AllReduce-1: expected ")
             << name << " in unit " << getUnitAttr();
    if (previous && !previous->isBeforeInBlock(param))
      return emitOpError("AllReduce-1: expected parameters in unit order, "
                         "got ")
             << name << " too late";
    previous = param;
    auto partial = cast<ShardedType>(grad.getType());
    ShardingAttr sharding = partial.getSharding();
    auto mesh = lookup<MeshOp>(symbols, *this, sharding.getMesh(), "Param-2");
    if (!mesh)
      return failure();
    if (!mesh.getMesh().getAxisSize(getAxis()))
      return emitOpError("AllReduce-3: expected an axis of ")
             << mesh.getMesh() << ", got: " << getAxisAttr();
    if (!isPartialShardOf(symbols, partial, param) ||
        !sharding.isPartialAlong(getAxis()) ||
        (getReduceDtype() &&
         partial.getTensor().getElementType() != *getReduceDtype()))
      return emitOpError("AllReduce-2: expected a part of ")
             << name << " that is partial along " << getAxisAttr()
             << ", in the dtype of the reduction, got: " << partial;
    SmallVector<Attribute> left;
    for (Attribute axis : sharding.getPartial())
      if (axis != getAxisAttr())
        left.push_back(axis);
    ShardedType expected =
        param.getPartialType(left, partial.getTensor().getElementType());
    if (reduced != expected)
      return emitOpError("AllReduce-2: expected ")
             << expected << " for " << name << ", got: " << reduced;
  }
  return success();
}
