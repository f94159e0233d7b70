//===- EmitPlan.cpp - planned level to the executable plan ----------------===//
#include "fsdp/Transforms/EmitPlan.h"
#include "AssignStreams.h"
#include "ElementTypes.h"
#include "EmitTrainingPolicy.h"
#include "SourceTables.h"
#include "VerifyPolicyTaken.h"

#include "fsdp/Transforms/Passes.h"
#include "llvm/ADT/DenseMap.h"
#include "llvm/ADT/TypeSwitch.h"

using namespace mlir;
using namespace mlir::fsdp;
namespace plan = ::fsdp::plan;

namespace {
class PlanEmitter {
public:
  PlanEmitter(ModuleOp module, SmallVectorImpl<Operation *> *ops)
      : module(module), ops(ops) {}

  FailureOr<plan::Plan> run() {
    program = getProgram(module);
    if (!program || failed(verifyPolicyTaken(module, program)) ||
        failed(emitDeclarations()) || failed(emitInputs()))
      return failure();
    if (failed(emitBody(program, result.instructions)))
      return failure();
    if (ProgramOp init = getInitProgram(module))
      if (failed(emitBody(init, result.init)))
        return failure();
    if (ProgramOp evaluation = getEvaluationProgram(module)) {
      for (auto [argument, input] :
           llvm::zip(evaluation.getBody().getArguments(), result.inputs))
        valueIds[argument] = input.value;
      loss = &result.evaluationLoss;
      if (failed(emitBody(evaluation, result.evaluation)))
        return failure();
    }
    return std::move(result);
  }

private:
  LogicalResult emitBody(ProgramOp of, std::vector<plan::Instruction> &to) {
    instructions = &to;
    phase = plan::Phase::Forward;
    bool isStep = &to == &result.instructions;
    loop = isStep ? getMicrobatches(of) : MicrobatchesOp();
    streams.emplace(to, isStep ? ops : nullptr, bool(loop));
    return emitBlock(of.getBody().front());
  }

  LogicalResult emitBlock(Block &block) {
    for (Operation &op : block)
      if (failed(emit(&op)) || isIncomplete)
        return failure();
    return success();
  }

  /// The loop's body once, and what its results and its gathers are.
  LogicalResult emitMicrobatches() {
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
        for (Value kept : firstGathers[gather->unit].getKept())
          gather->kept.push_back(use(kept));
    return success();
  }

  //===--------------------------------------------------------------------===//
  // Tables
  //===--------------------------------------------------------------------===//

  LogicalResult emitDeclarations() {
    result.producer = "fsdp-opt 0.1.0";
    auto text = [&](StringRef name) {
      auto attr = module->getAttrOfType<StringAttr>(name);
      return attr ? attr.str() : std::string();
    };
    result.model = text(modelAttrName);
    result.weights = {text(weightsAttrName), text(weightsHashAttrName)};
    if (auto from =
            module->getAttrOfType<DictionaryAttr>(capturedForAttrName)) {
      auto part = [&](StringRef name) {
        auto attr = from.getAs<StringAttr>(name);
        return attr ? attr.str() : std::string();
      };
      result.capturedFor = {part("device"), part("arch"), part("torch")};
    }

    auto meshes = llvm::to_vector(module.getOps<MeshOp>());
    if (meshes.size() != 1)
      return module.emitError("expected one fsdp.mesh in the module, got: ")
             << meshes.size();
    MeshAttr mesh = meshes.front().getMesh();
    result.worldSize = mesh.getNumRanks();
    result.replicas = mesh.getAxisSize(replicateAxisName).value_or(1);
    if (result.shards() != mesh.getAxisSize(shardAxisName))
      return meshes.front().emitError("a plan has the axes \"replicate\" and "
                                      "\"shard\", got: ")
             << mesh;

    for (auto unit : module.getOps<UnitOp>()) {
      unitIndex[unit.getSymNameAttr()] = result.units.size();
      result.units.push_back({unit.getSymName().str(),
                              {},
                              unit.getReshardAfterForward(),
                              unit.getCpuOffload()});
    }
    for (auto param : module.getOps<ParamOp>())
      if (failed(emitParam(param)) || isIncomplete)
        return failure();
    for (auto op : program.getOps<NoGradientOp>())
      for (auto name : op.getParamNames().getAsRange<FlatSymbolRefAttr>())
        result.params[find(paramIndex, name.getAttr())].unused = true;
    for (auto buffer : module.getOps<BufferOp>()) {
      bufferIndex[buffer.getSymNameAttr()] = result.buffers.size();
      auto spec = getSpec(buffer, cast<RankedTensorType>(buffer.getType()));
      if (failed(spec))
        return failure();
      result.buffers.push_back({buffer.getSymName().str(), *spec,
                                !buffer.getNonPersistent(),
                                getStrides(buffer.getStridesAttr())});
    }
    emitTrainingPolicy(module, result);
    return success();
  }

  LogicalResult emitParam(ParamOp param) {
    if (!param.getIgnored() && (!param.getUnitAttr() || !param.getSharding()))
      return param.emitError("expected a unit and a sharding: run the "
                             "fsdp-shard pipeline before emitting a plan");
    auto spec = getSpec(param, param.getTensorType());
    if (failed(spec))
      return failure();
    current = param;
    int32_t index = result.params.size();
    paramIndex[param.getSymNameAttr()] = index;
    plan::Param entry;
    entry.name = param.getSymName().str();
    if (auto aliases = param.getAliases())
      for (auto alias : aliases->getAsRange<StringAttr>())
        entry.aliases.push_back(alias.str());
    entry.spec = *spec;
    entry.requiresGrad = !param.getFrozen();
    if (!param.getIgnored()) {
      entry.unit = find(unitIndex, param.getUnitAttr().getAttr());
      entry.shardDim = int32_t(param.getShardingAttr().getShardedDim());
      result.units[entry.unit].params.push_back(index);
    }
    if (std::optional<Type> dtype = param.getComputeDtype())
      entry.computeDtype = getDType(*dtype);
    if (std::optional<Type> dtype = param.getGradDtype())
      entry.gradDtype = getDType(*dtype);
    result.params.push_back(std::move(entry));
    return success();
  }

  LogicalResult emitInputs() {
    for (auto [index, argument] :
         llvm::enumerate(program.getBody().getArguments())) {
      auto name =
          program.getArgAttrOfType<StringAttr>(index, inputNameAttrName);
      plan::Input input;
      input.name = name ? name.str() : "arg" + std::to_string(index);
      auto spec = getSpec(program, cast<RankedTensorType>(argument.getType()));
      if (failed(spec))
        return failure();
      input.spec = *spec;
      if (auto low =
              program.getArgAttrOfType<IntegerAttr>(index, inputLowAttrName))
        input.low = low.getInt();
      if (auto high =
              program.getArgAttrOfType<IntegerAttr>(index, inputHighAttrName))
        input.high = high.getInt();
      input.strides = getStrides(program.getArgAttrOfType<DenseI64ArrayAttr>(
          index, inputStridesAttrName));
      if (failed(define(argument, input.value)))
        return failure();
      result.inputs.push_back(std::move(input));
    }
    return success();
  }

  //===--------------------------------------------------------------------===//
  // Values
  //===--------------------------------------------------------------------===//

  static FailureOr<plan::TensorSpec> getSpec(Operation *op,
                                             RankedTensorType type) {
    std::optional<plan::DType> dtype = getDType(type.getElementType());
    if (!dtype || !type.hasStaticShape())
      return op->emitError("a plan has no tensor of type ") << type;
    ArrayRef<int64_t> shape = type.getShape();
    return plan::TensorSpec{{shape.begin(), shape.end()}, *dtype};
  }

  /// Gives `value` an id. A shard is recorded as rank 0's part, the largest.
  LogicalResult define(Value value, plan::ValueId &id) {
    RankedTensorType type;
    if (auto sharded = dyn_cast<ShardedType>(value.getType())) {
      type = sharded.getTensor();
      int64_t dim = sharded.getSharding().getShardedDim();
      SmallVector<int64_t> shape(type.getShape());
      if (dim >= 0)
        shape[dim] = plan::shardRows(shape[dim], result.shards(), 0).size();
      type = RankedTensorType::get(shape, type.getElementType());
    } else if (auto host = dyn_cast<HostType>(value.getType())) {
      type = cast<RankedTensorType>(host.getTypes().front());
    } else {
      type = cast<RankedTensorType>(value.getType());
    }
    auto spec = getSpec(program, type);
    if (failed(spec))
      return failure();
    id = static_cast<plan::ValueId>(result.values.size());
    valueIds[value] = id;
    result.values.emplace_back(*spec);
    if (Value owner = getStorageOwner(value); owner != value)
      result.values.back().storage = use(owner);
    return success();
  }

  plan::ValueId use(Value value) { return find(valueIds, value); }

  /// The index of what was defined before; an error of the operation that is
  /// being emitted otherwise, and 0.
  template <typename KeyT>
  int32_t find(const llvm::DenseMap<KeyT, int32_t> &table, KeyT key) {
    auto found = table.find(key);
    if (found != table.end())
      return found->second;
    if (!std::exchange(isIncomplete, true)) {
      auto diagnostic = current->emitOpError("names what a plan does not have");
      if constexpr (std::is_same_v<KeyT, Value>)
        diagnostic << ", a value of type " << key.getType();
      else
        diagnostic << ": " << key;
    }
    return 0;
  }

  /// Null: row-major.
  static plan::Strides getStrides(DenseI64ArrayAttr strides) {
    return strides ? plan::Strides(strides.asArrayRef()) : plan::Strides();
  }

  //===--------------------------------------------------------------------===//
  // Instructions
  //===--------------------------------------------------------------------===//

  /// The parameter or buffer that is read or written, the module of other ops.
  static StringRef getOwnerName(Operation *op) {
    return llvm::TypeSwitch<Operation *, StringRef>(op)
        .Case<ReadOp, WriteParamOp>([](auto op) { return op.getParam(); })
        .Case<ReadBufferOp, WriteBufferOp>(
            [](auto op) { return op.getBuffer(); })
        .Default([](Operation *op) { return getModuleName(op); });
  }

  template <typename KindT> void append(Operation *op, KindT kind) {
    plan::Instruction instruction;
    instruction.kind = std::move(kind);
    instruction.phase = phase;
    instruction.when = getWhen(op);
    instruction.module = sources.getModule(getOwnerName(op));
    instruction.line = sources.getLine(getSourceLine(op));
    instruction.why = getReason(op).str();
    instructions->push_back(std::move(instruction));
    if (ops && instructions == &result.instructions)
      ops->push_back(op);
    streams->assign(op);
  }

  plan::When getWhen(Operation *op) {
    Value condition = getCondition(op);
    if (!condition)
      return plan::When::Every;
    return condition == loop.getFirst() ? plan::When::First : plan::When::Last;
  }

  LogicalResult emit(Operation *op) {
    current = op;
    return llvm::TypeSwitch<Operation *, LogicalResult>(op)
        .Case<aten::CallOp>([&](auto call) { return emitCall(call); })
        .Case<ReadOp>([&](auto read) { return emitRead(read); })
        .Case<ReadBufferOp>([&](auto read) {
          plan::ReadBuffer kind;
          kind.buffer = find(bufferIndex, read.getBufferAttr().getAttr());
          if (failed(define(read.getResult(), kind.out)))
            return failure();
          append(op, kind);
          return success();
        })
        .Case<AllGatherOp>([&](auto gather) { return emitGather(gather); })
        .Case<WaitOp>([&](auto wait) {
          append(wait, plan::Wait{});
          return success();
        })
        .Case<ReshardOp>([&](auto reshard) {
          append(op, plan::Reshard{getUnit(reshard.getUnitAttr()),
                                   reshard.getKept().empty()
                                       ? 0
                                       : getPostForwardSize(reshard)});
          return emitFrees(op, reshard.getParams());
        })
        .Case<ReduceScatterOp>([&](auto reduce) { return emitReduce(reduce); })
        .Case<AccumulateOp>([&](auto op) {
          return emitGrads(op, op.getSums(), plan::Accumulate());
        })
        .Case<LossScaleOp>([&](auto read) {
          plan::LossScale kind;
          if (failed(define(read.getScale(), kind.out)))
            return failure();
          append(op, kind);
          return success();
        })
        .Case<UnscaleOp>([&](auto op) {
          plan::Unscale kind;
          kind.deferred = op.getDeferred();
          return emitGrads(op, op.getUnscaled(), std::move(kind));
        })
        .Case<ClipGradNormOp>([&](auto op) {
          plan::ClipGradNorm kind;
          kind.maxNorm = op.getMaxNorm().convertToDouble();
          kind.normType = op.getNormType().convertToDouble();
          return emitGrads(op, op.getClipped(), std::move(kind));
        })
        .Case<AllReduceOp>([&](auto reduce) { return emitAllReduce(reduce); })
        .Case<CopyToDeviceOp>([&](auto copy) {
          append(op, plan::CopyToDevice{getUnit(copy.getUnitAttr())});
          return success();
        })
        .Case<CopyToHostOp>([&](auto copy) {
          plan::CopyToHost kind;
          kind.unit = getUnit(copy.getUnitAttr());
          return emitGrads(copy, getResultsOp(op)->getResults(),
                           std::move(kind));
        })
        .Case<OffloadActivationOp>([&](auto offload) {
          plan::OffloadActivation kind;
          for (Value value : offload.getValues())
            kind.ins.push_back(use(value));
          if (failed(define(getResultsOp(op)->getResult(0), kind.out)))
            return failure();
          append(op, std::move(kind));
          return success();
        })
        .Case<ReloadActivationOp>([&](auto reload) {
          plan::ReloadActivation kind;
          kind.host = use(reload.getHost());
          for (Value value : getResultsOp(op)->getResults())
            if (failed(define(value, kind.outs.emplace_back())))
              return failure();
          append(op, std::move(kind));
          return success();
        })
        .Case<StageStateOp>([&](auto stage) {
          append(op, plan::StageState{getUnit(stage.getUnitAttr())});
          return success();
        })
        .Case<OptimizerStepOp>([&](auto step) {
          plan::OptimizerStep kind;
          if (auto groups = step.getGroups())
            kind.groups.assign(groups->begin(), groups->end());
          for (auto name :
               step.getParamNames().template getAsRange<FlatSymbolRefAttr>())
            kind.params.push_back(find(paramIndex, name.getAttr()));
          for (Value grad : step.getGrads())
            kind.grads.push_back(use(grad));
          append(op, std::move(kind));
          return success();
        })
        .Case<PhaseOp>([&](auto marker) {
          phase = static_cast<plan::Phase>(marker.getPhase());
          return success();
        })
        .Case<NoGradientOp>([](auto) { return success(); }) // a parameter's
        .Case<FreeOp>(
            [&](auto free) { return emitFrees(op, free.getValues()); })
        .Case<MicrobatchesOp>([&](auto) { return emitMicrobatches(); })
        .Case<YieldOp>([](auto) { return success(); }) // the loop's
        .Case<WriteParamOp>([&](auto write) {
          append(op, plan::WriteParam{
                         find(paramIndex, write.getParamAttr().getAttr()),
                         use(write.getValue())});
          return success();
        })
        .Case<WriteBufferOp>([&](auto write) {
          append(op, plan::WriteBuffer{
                         find(bufferIndex, write.getBufferAttr().getAttr()),
                         use(write.getValue())});
          return success();
        })
        .Case<ReturnOp>([&](auto ret) {
          if (Value value = ret.getLoss())
            *loss = use(value);
          return success();
        })
        .Default([](Operation *other) {
          return other->emitOpError("has no form in a plan: lower it first");
        });
  }

  int32_t getUnit(FlatSymbolRefAttr name) {
    return find(unitIndex, name.getAttr());
  }

  int64_t getPostForwardSize(ReshardOp reshard) {
    auto unit = module.lookupSymbol<UnitOp>(reshard.getUnitAttr());
    return unit.getPostForwardSize().value_or(0);
  }

  /// Of what `op`, an fsdp.free or fsdp.reshard, ends with the instruction
  /// before it, or its own.
  LogicalResult emitFrees(Operation *op, ValueRange values) {
    if (instructions->empty() || instructions->back().when != getWhen(op))
      return op->emitOpError("expected it behind an op that runs in the same "
                             "microbatches");
    for (Value value : values)
      instructions->back().frees.push_back(use(value));
    return success();
  }

  LogicalResult emitRead(ReadOp read) {
    if (isa<ShardedType>(read.getResult().getType()))
      return success(); // the gather that uses it names the unit
    plan::ReadParam kind;
    kind.param = find(paramIndex, read.getParamAttr().getAttr());
    if (result.params[kind.param].unit != -1)
      return read.emitOpError("reads a whole parameter: run "
                              "fsdp-insert-all-gathers first");
    if (failed(define(read.getResult(), kind.out)))
      return failure();
    append(read, kind);
    return success();
  }

  LogicalResult emitGather(AllGatherOp gather) {
    plan::AllGather kind;
    kind.unit = getUnit(gather.getUnitAttr());
    if (gather.getCondition())
      firstGathers[kind.unit] = gather;
    if (!gather.getShards().empty())
      if (auto kept = gather.getShards().front().getDefiningOp<ReshardOp>())
        kind.group = getPostForwardSize(kept);
    for (Value param : getResultsOp(gather)->getResults())
      if (failed(define(param, kind.outs.emplace_back())))
        return failure();
    append(gather, std::move(kind));
    return success();
  }

  LogicalResult emitReduce(ReduceScatterOp reduce) {
    plan::ReduceScatter kind;
    kind.unit = getUnit(reduce.getUnitAttr());
    for (auto name : reduce.getParamNames().getAsRange<FlatSymbolRefAttr>())
      kind.params.push_back(find(paramIndex, name.getAttr()));
    for (Value grad : reduce.getGrads())
      kind.ins.push_back(use(grad));
    if (std::optional<Type> dtype = reduce.getReduceDtype())
      kind.reduceDtype = getDType(*dtype);
    if (reduce.getKind() == ReduceKind::Sum)
      kind.divisors = {
          reduce.getPredivide().value_or(APFloat(1.0)).convertToDouble(),
          reduce.getPostdivide().value_or(APFloat(1.0)).convertToDouble(),
          reduce.getPremultiply().value_or(APFloat(1.0)).convertToDouble()};
    for (Value shard : getResultsOp(reduce)->getResults())
      if (failed(define(shard, kind.outs.emplace_back())))
        return failure();
    for (size_t i = 0; i < kind.outs.size(); ++i)
      if (keepsGradient(reduce, kind, i))
        share(kind.ins[i], kind.outs[i]);
    append(reduce, std::move(kind));
    return success();
  }

  /// Lets `out` be of the storage of `in`, which its instruction consumes.
  void share(plan::ValueId in, plan::ValueId out) {
    plan::ValueId storage = result.values[in].storage;
    result.values[out].storage = storage == -1 ? in : storage;
  }

  /// Whether the only rank of a replica has nothing to do for a gradient; what
  /// is all-reduced goes where the other replicas read it.
  bool keepsGradient(ReduceScatterOp reduce, const plan::ReduceScatter &kind,
                     size_t index) const {
    plan::DType in = result.values[kind.ins[index]].dtype;
    auto one = plan::ReduceScatter::Divisors();
    return result.shards() == 1 &&
           in == result.values[kind.outs[index]].dtype &&
           kind.reduceDtype.value_or(in) == in &&
           kind.divisors.value_or(one) == one &&
           llvm::none_of(getResultsOp(reduce)->getResult(index).getUsers(),
                         llvm::IsaPred<AllReduceOp>);
  }

  /// An instruction from gradients to gradients of the same parameters.
  template <typename OpT, typename KindT>
  LogicalResult emitGrads(OpT op, ValueRange results, KindT kind) {
    for (auto name :
         op.getParamNames().template getAsRange<FlatSymbolRefAttr>())
      kind.params.push_back(find(paramIndex, name.getAttr()));
    for (Value grad : op.getGrads())
      kind.ins.push_back(use(grad));
    for (Value out : results)
      if (failed(define(out, kind.outs.emplace_back())))
        return failure();
    // Unscaled and clipped in place; of a lone rank, two parameters' gradients
    // may be one.
    if (isa<UnscaleOp, ClipGradNormOp>(op) && result.worldSize > 1)
      for (auto [in, out] : llvm::zip(kind.ins, kind.outs))
        share(in, out);
    append(op, std::move(kind));
    return success();
  }

  LogicalResult emitAllReduce(AllReduceOp reduce) {
    if (reduce.getAxis() != replicateAxisName)
      return reduce.emitOpError("a plan all-reduces over axis \"replicate\", "
                                "got: ")
             << reduce.getAxisAttr();
    plan::AllReduce kind;
    kind.unit = getUnit(reduce.getUnitAttr());
    for (auto name : reduce.getParamNames().getAsRange<FlatSymbolRefAttr>())
      kind.params.push_back(find(paramIndex, name.getAttr()));
    for (Value grad : reduce.getGrads())
      kind.ins.push_back(use(grad));
    for (Value reduced : getResultsOp(reduce)->getResults())
      if (failed(define(reduced, kind.outs.emplace_back())))
        return failure();
    if (reduce.getKind() == ReduceKind::Sum)
      kind.postdivide =
          reduce.getPostdivide().value_or(APFloat(1.0)).convertToDouble();
    append(reduce, std::move(kind));
    return success();
  }

  LogicalResult emitCall(aten::CallOp call) {
    plan::Call kind;
    auto [op, overload] = call.getCallee().split('.');
    kind.op = op.str();
    kind.overload = overload.str();
    unsigned next = 0;
    for (Attribute arg : call.getArgs())
      if (failed(emitArg(call, arg, next, kind.args.emplace_back())))
        return failure();
    for (OpResult out : call->getOpResults()) {
      if (out.use_empty()) {
        kind.outs.push_back(-1);
        continue;
      }
      if (failed(define(out, kind.outs.emplace_back())))
        return failure();
      if (auto strides = call.getStrides())
        result.values.back().strides = getStrides(
            cast<DenseI64ArrayAttr>((*strides)[out.getResultNumber()]));
    }
    if (FlatSymbolRefAttr param = call.getReduceInputOfAttr())
      kind.reduceInputOf = find(paramIndex, param.getAttr());
    for (int64_t operand : call.getMutates().value_or(ArrayRef<int64_t>()))
      kind.mutates.push_back(use(call.getOperand(operand)));
    kind.recompute = call.getRecompute();
    kind.schema = call.getSchema().value_or("").str();
    append(call, std::move(kind));
    return success();
  }

  LogicalResult emitArg(aten::CallOp call, Attribute attr, unsigned &next,
                        plan::Arg &arg) {
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

  ModuleOp module;
  SmallVectorImpl<Operation *> *ops;
  ProgramOp program;
  plan::Plan result;
  /// Where the instructions and the loss of the program being emitted go.
  std::vector<plan::Instruction> *instructions = nullptr;
  plan::ValueId *loss = &result.loss;
  plan::Phase phase = plan::Phase::Forward;
  Operation *current = nullptr;
  bool isIncomplete = false;
  llvm::DenseMap<Value, plan::ValueId> valueIds;
  llvm::DenseMap<StringAttr, int32_t> unitIndex, paramIndex, bufferIndex;
  /// The loop of the program being emitted, and its gathers of the first
  /// microbatch, by unit.
  MicrobatchesOp loop;
  llvm::DenseMap<int32_t, AllGatherOp> firstGathers;
  SourceTables sources{result};
  std::optional<StreamAssigner> streams; ///< of the same program
};
} // namespace

FailureOr<plan::Plan> mlir::fsdp::emitPlan(ModuleOp module,
                                           SmallVectorImpl<Operation *> *ops) {
  return PlanEmitter(module, ops).run();
}
