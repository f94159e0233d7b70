//===- EmitInstructions.cpp - an op becomes an instruction ----------------===//
#include "ElementTypes.h"
#include "PlanEmitter.h"

#include "llvm/ADT/TypeSwitch.h"

using namespace mlir;
using namespace mlir::fsdp;
namespace plan = ::fsdp::plan;

LogicalResult PlanEmitter::emitBody(ProgramOp of,
                                    std::vector<plan::Instruction> &to,
                                    SmallVector<Operation *> *from) {
  instructions = &to;
  ops = from;
  phase = plan::Phase::Forward;
  loop = getMicrobatches(of);
  return emitBlock(of.getBody().front());
}

LogicalResult PlanEmitter::emitBlock(Block &block) {
  for (Operation &op : block)
    if (failed(emit(&op)) || isIncomplete)
      return failure();
  return success();
}

//===----------------------------------------------------------------------===//
// What every instruction has
//===----------------------------------------------------------------------===//

/// The parameter or buffer that is read or written, the module of other ops.
static StringRef getOwnerName(Operation *op) {
  return llvm::TypeSwitch<Operation *, StringRef>(op)
      .Case<ReadOp, WriteParamOp>([](auto op) { return op.getParam(); })
      .Case<ReadBufferOp, WriteBufferOp>([](auto op) { return op.getBuffer(); })
      .Default([](Operation *op) { return getModuleName(op); });
}

plan::Instruction PlanEmitter::getCommon(Operation *op) {
  plan::Instruction instruction;
  instruction.phase = phase;
  instruction.when = getWhen(op);
  instruction.module = sources.getModule(getOwnerName(op));
  instruction.line = sources.getLine(getSourceLine(op));
  instruction.why = getReason(op).str();
  if (auto stream = op->getAttrOfType<StringAttr>(streamAttrName))
    instruction.stream = getStream(stream);
  if (auto events = op->getAttrOfType<DenseI32ArrayAttr>(waitsAttrName))
    instruction.waits.assign(events.asArrayRef().begin(),
                             events.asArrayRef().end());
  if (auto event = op->getAttrOfType<IntegerAttr>(recordsAttrName))
    instruction.records = int32_t(event.getInt());
  instruction.buffer = getBuffer(op);
  return instruction;
}

/// The compute stream, with an error, for a name that no stream has.
plan::Stream PlanEmitter::getStream(StringAttr name) {
  for (size_t i = 0; i < plan::kNumStreams; ++i)
    if (name == StringRef(plan::streamName(plan::Stream(i))))
      return plan::Stream(i);
  if (!std::exchange(isIncomplete, true))
    current->emitOpError("Stream-1: expected the name of a stream, got: ")
        << name;
  return plan::Stream::Compute;
}

plan::ValueId PlanEmitter::getBuffer(Operation *op) {
  return llvm::TypeSwitch<Operation *, plan::ValueId>(op)
      .Case<ReduceScatterOp, AllReduceOp, CopyToDeviceOp, ReshardOp>(
          [&](auto op) { return op.getBuffer() ? use(op.getBuffer()) : -1; })
      .Default([](auto) { return -1; });
}

plan::When PlanEmitter::getWhen(Operation *op) {
  Value condition = getCondition(op);
  if (!condition)
    return plan::When::Every;
  return condition == loop.getFirst() ? plan::When::First : plan::When::Last;
}

//===----------------------------------------------------------------------===//
// Parameters and buffers
//===----------------------------------------------------------------------===//

template <> LogicalResult PlanEmitter::emitOp(ReadOp read) {
  if (isa<ShardedType>(read.getResult().getType()))
    return success(); // the gather that uses it names the unit
  plan::ReadParam kind;
  kind.param = getParam(read.getParamAttr());
  if (result.params[kind.param].unit != -1)
    return read.emitOpError("reads a whole parameter: run "
                            "fsdp-insert-all-gathers first");
  if (failed(define(read.getResult(), kind.out)))
    return failure();
  return append(read, kind);
}

template <> LogicalResult PlanEmitter::emitOp(WriteParamOp write) {
  return append(write, plan::WriteParam{getParam(write.getParamAttr()),
                                        use(write.getValue())});
}

template <> LogicalResult PlanEmitter::emitOp(ReadBufferOp read) {
  plan::ReadBuffer kind;
  kind.buffer = find(bufferIndex, read.getBufferAttr().getAttr());
  if (failed(define(read.getResult(), kind.out)))
    return failure();
  return append(read, kind);
}

template <> LogicalResult PlanEmitter::emitOp(WriteBufferOp write) {
  return append(write, plan::WriteBuffer{
                           find(bufferIndex, write.getBufferAttr().getAttr()),
                           use(write.getValue())});
}

//===----------------------------------------------------------------------===//
// Collectives
//===----------------------------------------------------------------------===//

int64_t PlanEmitter::getPostForwardSize(ReshardOp reshard) {
  auto unit = module.lookupSymbol<UnitOp>(reshard.getUnitAttr());
  return unit.getPostForwardSize().value_or(0);
}

template <> LogicalResult PlanEmitter::emitOp(AllGatherOp gather) {
  plan::AllGather kind;
  kind.unit = getUnit(gather.getUnitAttr());
  if (gather.getCondition())
    firstGathers[kind.unit] = gather;
  if (!gather.getShards().empty())
    if (Operation *source = gather.getShards().front().getDefiningOp()) {
      if (auto kept = dyn_cast<ReshardOp>(source))
        kind.group = getPostForwardSize(kept);
      kind.source = getBuffer(source);
    }
  if (failed(define(getResultsOp(gather)->getResults(), kind.outs)))
    return failure();
  return append(gather, std::move(kind));
}

template <> LogicalResult PlanEmitter::emitOp(ReshardOp reshard) {
  int64_t group = reshard.getKept().empty() ? 0 : getPostForwardSize(reshard);
  if (failed(append(reshard,
                    plan::Reshard{getUnit(reshard.getUnitAttr()), group})))
    return failure();
  return emitFrees(reshard, reshard.getParams());
}

template <> LogicalResult PlanEmitter::emitOp(ReduceScatterOp reduce) {
  plan::ReduceScatter kind;
  kind.unit = getUnit(reduce.getUnitAttr());
  kind.params = getParams(reduce.getParamNames());
  kind.ins = use(reduce.getGrads());
  if (std::optional<Type> dtype = reduce.getReduceDtype())
    kind.reduceDtype = getDType(*dtype);
  if (reduce.getKind() == ReduceKind::Sum)
    kind.divisors = {
        reduce.getPredivide().value_or(APFloat(1.0)).convertToDouble(),
        reduce.getPostdivide().value_or(APFloat(1.0)).convertToDouble(),
        reduce.getPremultiply().value_or(APFloat(1.0)).convertToDouble()};
  if (failed(define(getResultsOp(reduce)->getResults(), kind.outs)))
    return failure();
  for (size_t i = 0; i < kind.outs.size(); ++i)
    if (keepsGradient(reduce, kind, i))
      share(kind.ins[i], kind.outs[i]);
  return append(reduce, std::move(kind));
}

bool PlanEmitter::keepsGradient(ReduceScatterOp reduce,
                                const plan::ReduceScatter &kind,
                                size_t index) const {
  const plan::Value &gradient = result.values[kind.ins[index]];
  const plan::Value &shard = result.values[kind.outs[index]];
  const plan::Value &storage =
      gradient.storage == -1 ? gradient : result.values[gradient.storage];
  plan::DType in = gradient.dtype;
  auto one = plan::ReduceScatter::Divisors();
  return result.shards() == 1 && in == shard.dtype &&
         storage.numBytes() == shard.numBytes() && // not a part of more
         kind.reduceDtype.value_or(in) == in &&
         kind.divisors.value_or(one) == one &&
         llvm::none_of(getResultsOp(reduce)->getResult(index).getUsers(),
                       llvm::IsaPred<AllReduceOp>);
}

template <> LogicalResult PlanEmitter::emitOp(AllReduceOp reduce) {
  if (reduce.getAxis() != replicateAxisName)
    return reduce.emitOpError("a plan all-reduces over axis \"replicate\", "
                              "got: ")
           << reduce.getAxisAttr();
  plan::AllReduce kind;
  kind.unit = getUnit(reduce.getUnitAttr());
  if (reduce.getKind() == ReduceKind::Sum)
    kind.postdivide =
        reduce.getPostdivide().value_or(APFloat(1.0)).convertToDouble();
  return emitGradients(reduce, getResultsOp(reduce)->getResults(),
                       std::move(kind));
}

//===----------------------------------------------------------------------===//
// Streams and lifetimes
//===----------------------------------------------------------------------===//

template <> LogicalResult PlanEmitter::emitOp(WaitOp wait) {
  return append(wait, plan::Wait{});
}

template <> LogicalResult PlanEmitter::emitOp(MarkOp mark) {
  return append(mark, plan::Wait{});
}

template <> LogicalResult PlanEmitter::emitOp(AllocateOp allocate) {
  plan::ValueId id;
  return define(allocate.getBuffer(), id);
}

template <> LogicalResult PlanEmitter::emitOp(FreeOp free) {
  return emitFrees(free, free.getValues());
}

LogicalResult PlanEmitter::emitFrees(Operation *op, ValueRange values) {
  if (instructions->empty() || instructions->back().when != getWhen(op))
    return op->emitOpError("expected it after an op that runs in the same "
                           "microbatches");
  llvm::append_range(instructions->back().frees, use(values));
  return success();
}

//===----------------------------------------------------------------------===//
// The program
//===----------------------------------------------------------------------===//

template <> LogicalResult PlanEmitter::emitOp(PhaseOp marker) {
  phase = static_cast<plan::Phase>(marker.getPhase());
  return success();
}

template <> LogicalResult PlanEmitter::emitOp(NoGradientOp) {
  return success(); // an entry of the parameter
}

template <> LogicalResult PlanEmitter::emitOp(ReturnOp ret) {
  if (Value value = ret.getLoss())
    *loss = use(value);
  return success();
}

/// The loop's body once, and what its results and its gathers are.
template <> LogicalResult PlanEmitter::emitOp(MicrobatchesOp) {
  result.accumulationSteps = static_cast<int64_t>(loop.getSteps());
  for (auto [input, argument] :
       llvm::zip(loop.getInputs(), loop.getBlock()->getArguments()))
    valueIds[argument] = use(input);
  if (failed(emitBlock(*loop.getBlock())))
    return failure();
  current = loop;
  for (auto [yielded, value] :
       llvm::zip(loop.getYield().getResults(), loop.getResults()))
    valueIds[value] = use(yielded);
  for (auto [argument, carried] :
       llvm::zip(loop.getCarried(), loop.getYield().getCarried()))
    valueIds[argument] = use(carried);
  for (plan::Instruction &instruction : *instructions)
    if (auto *gather = std::get_if<plan::AllGather>(&instruction.kind);
        gather && instruction.when == plan::When::First)
      gather->kept = use(firstGathers[gather->unit].getKept());
  return success();
}

template <> LogicalResult PlanEmitter::emitOp(YieldOp) {
  return success(); // with the loop
}

//===----------------------------------------------------------------------===//
// Gradients and the optimizer
//===----------------------------------------------------------------------===//

template <typename OpT, typename KindT>
LogicalResult PlanEmitter::emitGradients(OpT op, ValueRange results,
                                         KindT kind) {
  kind.params = getParams(op.getParamNames());
  kind.ins = use(op.getGrads());
  if (failed(define(results, kind.outs)))
    return failure();
  // Unscaled and clipped in place; of a lone rank, two parameters' gradients
  // may be one.
  if (isa<UnscaleOp, ClipGradNormOp>(op) && result.worldSize > 1)
    for (auto [in, out] : llvm::zip(kind.ins, kind.outs))
      share(in, out);
  return append(op, std::move(kind));
}

template <> LogicalResult PlanEmitter::emitOp(AccumulateOp accumulate) {
  return emitGradients(accumulate, accumulate.getSums(), plan::Accumulate());
}

template <> LogicalResult PlanEmitter::emitOp(LossScaleOp read) {
  plan::LossScale kind;
  if (failed(define(read.getScale(), kind.out)))
    return failure();
  return append(read, kind);
}

template <> LogicalResult PlanEmitter::emitOp(UnscaleOp unscale) {
  plan::Unscale kind;
  kind.deferred = unscale.getDeferred();
  return emitGradients(unscale, unscale.getUnscaled(), std::move(kind));
}

template <> LogicalResult PlanEmitter::emitOp(ClipGradNormOp clip) {
  plan::ClipGradNorm kind;
  kind.maxNorm = clip.getMaxNorm().convertToDouble();
  kind.normType = clip.getNormType().convertToDouble();
  return emitGradients(clip, clip.getClipped(), std::move(kind));
}

template <> LogicalResult PlanEmitter::emitOp(OptimizerStepOp step) {
  plan::OptimizerStep kind;
  if (auto groups = step.getGroups())
    kind.groups.assign(groups->begin(), groups->end());
  kind.params = getParams(step.getParamNames());
  kind.grads = use(step.getGrads());
  return append(step, std::move(kind));
}

//===----------------------------------------------------------------------===//
// Copies between the host and the device
//===----------------------------------------------------------------------===//

template <> LogicalResult PlanEmitter::emitOp(CopyToDeviceOp copy) {
  return append(copy, plan::CopyToDevice{getUnit(copy.getUnitAttr())});
}

template <> LogicalResult PlanEmitter::emitOp(CopyToHostOp copy) {
  plan::CopyToHost kind;
  kind.unit = getUnit(copy.getUnitAttr());
  return emitGradients(copy, getResultsOp(copy)->getResults(), std::move(kind));
}

template <> LogicalResult PlanEmitter::emitOp(StageStateOp stage) {
  return append(stage, plan::StageState{getUnit(stage.getUnitAttr())});
}

template <> LogicalResult PlanEmitter::emitOp(OffloadActivationOp offload) {
  plan::OffloadActivation kind;
  kind.ins = use(offload.getValues());
  if (failed(define(getResultsOp(offload)->getResult(0), kind.out)))
    return failure();
  return append(offload, std::move(kind));
}

template <> LogicalResult PlanEmitter::emitOp(ReloadActivationOp reload) {
  plan::ReloadActivation kind;
  kind.host = use(reload.getHost());
  if (failed(define(getResultsOp(reload)->getResults(), kind.outs)))
    return failure();
  return append(reload, std::move(kind));
}

//===----------------------------------------------------------------------===//
// ATen's operators
//===----------------------------------------------------------------------===//

template <> LogicalResult PlanEmitter::emitOp(aten::CallOp call) {
  plan::Call kind;
  auto [op, overload] = call.getCallee().split('.');
  kind.op = op.str();
  kind.overload = overload.str();
  unsigned next = 0;
  for (Attribute arg : call.getArgs())
    if (failed(emitArg(call, arg, next, kind.args.emplace_back())))
      return failure();
  for (OpResult out : call->getOpResults()) {
    plan::ValueId &id = kind.outs.emplace_back(-1);
    if (out.use_empty())
      continue;
    if (failed(define(out, id)))
      return failure();
    if (auto strides = call.getStrides())
      result.values.back().strides = getStrides(
          cast<DenseI64ArrayAttr>((*strides)[out.getResultNumber()]));
  }
  if (FlatSymbolRefAttr param = call.getReduceInputOfAttr())
    kind.reduceInputOf = getParam(param);
  for (int64_t operand : call.getMutates().value_or(ArrayRef<int64_t>()))
    kind.mutates.push_back(use(call.getOperand(operand)));
  kind.recompute = call.getRecompute();
  kind.schema = call.getSchema().value_or("").str();
  return append(call, std::move(kind));
}

template <> LogicalResult PlanEmitter::emitOp(FusedOp fused) {
  plan::Fused kind;
  kind.kernel = find(kernelIndex, fused.getKernelAttr().getAttr());
  kind.ins = use(fused.getOperands());
  if (failed(define(fused.getResults(), kind.outs)) || isIncomplete)
    return failure();
  const plan::Kernel &kernel = result.kernels[size_t(kind.kernel)];
  for (auto [out, value] : llvm::zip(kind.outs, kernel.results))
    result.values[size_t(out)].strides = kernel.values[size_t(value)].strides;
  return append(fused, std::move(kind));
}

LogicalResult PlanEmitter::emitArg(aten::CallOp call, Attribute attr,
                                   unsigned &next, plan::Arg &arg) {
  if (isa<UnitAttr>(attr)) {
    arg.value = plan::TensorArg{use(call.getOperand(next++))};
  } else if (isa<aten::NoneAttr>(attr)) {
    arg.value = plan::NoneArg{};
  } else if (isa<aten::DeviceAttr>(attr)) {
    arg.value = plan::DeviceArg{};
  } else if (auto flag = dyn_cast<BoolAttr>(attr)) {
    arg.value = flag.getValue();
  } else if (auto integer = dyn_cast<IntegerAttr>(attr)) {
    arg.value = integer.getInt();
  } else if (auto real = dyn_cast<FloatAttr>(attr)) {
    arg.value = real.getValueAsDouble();
  } else if (auto number = dyn_cast<aten::ComplexAttr>(attr)) {
    arg.value = std::complex(number.getReal().getValueAsDouble(),
                             number.getImag().getValueAsDouble());
  } else if (auto text = dyn_cast<StringAttr>(attr)) {
    arg.value = text.str();
  } else if (auto list = dyn_cast<ArrayAttr>(attr)) {
    plan::ArgList elements;
    for (Attribute element : list)
      if (failed(emitArg(call, element, next, elements.emplace_back())))
        return failure();
    arg.value = std::move(elements);
  } else {
    return call.emitOpError("a plan has no argument of the form ") << attr;
  }
  return success();
}

//===----------------------------------------------------------------------===//
// All ops
//===----------------------------------------------------------------------===//

LogicalResult PlanEmitter::emit(Operation *op) {
  current = op;
  return llvm::TypeSwitch<Operation *, LogicalResult>(op)
      .Case<ReadOp, WriteParamOp, ReadBufferOp, WriteBufferOp, AllGatherOp,
            ReshardOp, ReduceScatterOp, AllReduceOp, WaitOp, MarkOp, AllocateOp,
            FreeOp, PhaseOp, NoGradientOp, ReturnOp, MicrobatchesOp, YieldOp,
            AccumulateOp, LossScaleOp, UnscaleOp, ClipGradNormOp,
            OptimizerStepOp, CopyToDeviceOp, CopyToHostOp, StageStateOp,
            OffloadActivationOp, ReloadActivationOp, FusedOp, aten::CallOp>(
          [&](auto op) { return emitOp(op); })
      .Default([](Operation *other) {
        return other->emitOpError(
            "cannot be expressed in a plan: lower it first");
      });
}
