//===- MicrobatchOps.cpp - the loop over microbatches ---------------------===//
#include "SymbolChecks.h"

using namespace mlir;
using namespace mlir::fsdp;

MicrobatchesOp mlir::fsdp::getMicrobatches(ProgramOp program) {
  // By the loss: a search would pass over all ops of a program without a loop.
  Block &body = program.getBody().front();
  auto end = body.empty() ? ReturnOp() : dyn_cast<ReturnOp>(body.back());
  return end && end.getLoss() ? end.getLoss().getDefiningOp<MicrobatchesOp>()
                              : MicrobatchesOp();
}

// A module that is not verified yet may yield anything.
Value mlir::fsdp::getYielded(Value value) {
  auto loop = value.getDefiningOp<MicrobatchesOp>();
  if (!loop || loop.getBody().empty() || loop.getBody().front().empty())
    return value;
  auto yield = dyn_cast<YieldOp>(loop.getBody().front().back());
  unsigned number = cast<OpResult>(value).getResultNumber();
  if (!yield || number >= yield.getResults().size())
    return value;
  return yield.getResults()[number];
}

Value mlir::fsdp::getCondition(Operation *op) {
  if (auto wait = dyn_cast<WaitOp>(op))
    op = wait.getFuture().getDefiningOp();
  auto conditional = dyn_cast_or_null<ConditionalOpInterface>(op);
  return conditional ? conditional.getCondition() : Value();
}

YieldOp MicrobatchesOp::getYield() {
  return cast<YieldOp>(getBlock()->getTerminator());
}

BlockArgument MicrobatchesOp::carry(Value value) {
  getYield().getCarriedMutable().append(value);
  return getBlock()->addArgument(
      CarriedType::get(getContext(), value.getType()), value.getLoc());
}

LogicalResult MicrobatchesOp::verifyRegions() {
  Block &body = getBody().front();
  if (static_cast<int64_t>(getSteps()) < 2)
    return emitOpError("Microbatches-1: expected at least two, got: ")
           << static_cast<int64_t>(getSteps());
  SmallVector<Type> expected(getInputs().getTypes());
  auto flag = IntegerType::get(getContext(), 1);
  expected.append({flag, flag});
  SmallVector<Type> taken(body.getArgumentTypes());
  if (taken.size() < expected.size() ||
      ArrayRef(taken).take_front(expected.size()) != ArrayRef(expected) ||
      !llvm::all_of(ArrayRef(taken).drop_front(expected.size()),
                    llvm::IsaPred<CarriedType>))
    return emitOpError("Microbatches-1: expected a block that takes the "
                       "inputs, two i1 and carried values, got: ")
           << taken;
  Operation *program = (*this)->getParentOp();
  for (Value input : getInputs())
    if (auto argument = dyn_cast<BlockArgument>(input);
        !argument || argument.getOwner()->getParentOp() != program)
      return emitOpError("Microbatches-1: expected arguments of the program as "
                         "inputs, got: ")
             << input;
  auto yield = dyn_cast<YieldOp>(body.getTerminator());
  if (!yield)
    return emitOpError("Microbatches-2: expected an fsdp.yield at the end");
  auto isScalar = [](Type type) {
    auto tensor = dyn_cast<RankedTensorType>(type);
    return tensor && tensor.getRank() == 0;
  };
  if (yield.getResults().getTypes() != getResultTypes() ||
      getNumResults() == 0 || !isScalar(getResultTypes().front()))
    return yield.emitOpError(
               "Microbatches-2: expected the results of the loop, "
               "a scalar loss first, got: ")
           << yield.getResults().getTypes();
  for (Type type : yield.getCarried().getTypes())
    expected.push_back(CarriedType::get(getContext(), type));
  if (taken != expected)
    return yield.emitOpError("Microbatches-2: expected to carry a value for "
                             "each of the block's arguments ")
           << ArrayRef(taken) << ", got: " << yield.getCarried().getTypes();
  for (Value flagArgument : {Value(getFirst()), Value(getLast())})
    for (Operation *user : flagArgument.getUsers())
      if (auto conditional = dyn_cast<ConditionalOpInterface>(user);
          !conditional || conditional.getCondition() != flagArgument)
        return user->emitOpError("Microbatches-3: expected the first or last "
                                 "microbatch only as a condition");
  return success();
}

//===----------------------------------------------------------------------===//
// AccumulateOp
//===----------------------------------------------------------------------===//

/// Checks the type of an accumulated gradient against its parameter.
static LogicalResult verifyAccumulated(SymbolTableCollection &symbols,
                                       AccumulateOp op, FlatSymbolRefAttr name,
                                       ParamOp param, Type type, Type sum) {
  if (Type(param.getGradType()) == type) {
    UnitOp unit;
    if (FlatSymbolRefAttr unitName = param.getUnitAttr())
      unit = symbols.lookupNearestSymbolFrom<UnitOp>(op, unitName);
    RankedTensorType expected = getAccumulatedType(param, unit);
    if (sum == expected)
      return success();
    return op.emitOpError("Accumulate-1: expected a sum of ")
           << expected << " for " << name << ", got: " << sum;
  }
  if (sum == type && (type == param.getShardedType() ||
                      isPartialShardOf(symbols, type, param)))
    return success();
  return op.emitOpError("Accumulate-1: expected ")
         << param.getGradType() << " or its sharded type for " << name
         << ", got: " << type << " to " << sum;
}

LogicalResult AccumulateOp::verifySymbolUses(SymbolTableCollection &symbols) {
  size_t count = getParamNames().size();
  if (count != getGrads().size() || count != getBefore().size() ||
      count != getSums().size())
    return emitOpError("Accumulate-1: expected ")
           << count
           << " gradients, sums before and sums, got: " << getGrads().size()
           << ", " << getBefore().size() << " and " << getSums().size();
  auto loop = cast<MicrobatchesOp>((*this)->getParentOp());
  auto yield = dyn_cast<YieldOp>(loop.getBlock()->getTerminator());
  unsigned begin = loop.getInputs().size() + 2;
  for (auto [attr, grad, before, sum] :
       llvm::zip(getParamNames(), getGrads(), getBefore(), getSums())) {
    auto name = cast<FlatSymbolRefAttr>(attr);
    auto param = lookup<ParamOp>(symbols, *this, name, "Accumulate-1");
    if (!param || failed(verifyAccumulated(symbols, *this, name, param,
                                           grad.getType(), sum.getType())))
      return failure();
    auto argument = dyn_cast<BlockArgument>(before);
    unsigned number = argument ? argument.getArgNumber() - begin : 0;
    if (!argument || argument.getOwner() != loop.getBlock() || !yield ||
        number >= yield.getCarried().size() ||
        yield.getCarried()[number] != sum)
      return emitOpError("Accumulate-2: expected the gradient of ")
             << name << " to be added to the sum that is carried";
  }
  return success();
}
