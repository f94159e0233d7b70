//===- EmitPlan.cpp - planned level to the executable plan ----------------===//
#include "fsdp/Transforms/EmitPlan.h"
#include "ElementTypes.h"
#include "EmitTrainingPolicy.h"
#include "PlanEmitter.h"
#include "VerifyPolicyTaken.h"
#include "fsdp/Dialect/ModelParallel.h"
#include "fsdp/Dialect/Storages.h"

using namespace mlir;
using namespace mlir::fsdp;
namespace plan = ::fsdp::plan;

FailureOr<plan::Plan> mlir::fsdp::emitPlan(ModuleOp module,
                                           PlanOrigins *origins) {
  return PlanEmitter(module).run(origins);
}

FailureOr<plan::Plan> PlanEmitter::run(PlanOrigins *to) {
  program = getProgram(module);
  if (!program || failed(verifyPolicyTaken(module, program)) ||
      failed(emitDeclarations()) || failed(emitInputs()) ||
      failed(emitPrograms()))
    return failure();
  if (to)
    *to = std::move(origins);
  return std::move(result);
}

LogicalResult PlanEmitter::emitPrograms() {
  if (failed(emitBody(program, result.instructions, &origins.step)))
    return failure();
  if (ProgramOp init = getInitProgram(module))
    if (failed(emitBody(init, result.init, nullptr)))
      return failure();
  ProgramOp evaluation = getEvaluationProgram(module);
  if (!evaluation)
    return success();
  for (auto [argument, input] :
       llvm::zip(evaluation.getBody().getArguments(), result.inputs))
    valueIds[argument] = input.value;
  loss = &result.evaluationLoss;
  return emitBody(evaluation, result.evaluation, &origins.evaluation);
}

//===----------------------------------------------------------------------===//
// Tables
//===----------------------------------------------------------------------===//

LogicalResult PlanEmitter::emitDeclarations() {
  result.producer = "fsdp-opt 0.1.0";
  emitSource();
  if (failed(emitMesh()))
    return failure();
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
    for (int32_t param : getParams(op.getParamNames()))
      result.params[param].unused = true;
  for (auto buffer : module.getOps<BufferOp>())
    if (failed(emitBuffer(buffer)))
      return failure();
  for (auto kernel : module.getOps<KernelOp>())
    if (failed(emitKernel(kernel)))
      return failure();
  emitTrainingPolicy(module, result);
  result.arena = getArena(arenaAttrName);
  result.hostArena = getArena(hostArenaAttrName);
  for (auto schedule : module.getOps<ScheduleOp>())
    if (IntegerAttr budget = schedule.getMemoryBudgetAttr();
        budget && result.arena)
      result.memoryBudget = budget.getInt();
  return success();
}

/// The model, its weights, and the machine it was captured for.
void PlanEmitter::emitSource() {
  auto text = [&](StringRef name) {
    auto attr = module->getAttrOfType<StringAttr>(name);
    return attr ? attr.str() : std::string();
  };
  result.model = text(modelAttrName);
  result.weights = {text(weightsAttrName), text(weightsHashAttrName)};
  result.modelParallel = getModelParallel(module);
  auto from = module->getAttrOfType<DictionaryAttr>(capturedForAttrName);
  if (!from)
    return;
  auto part = [&](StringRef name) {
    auto attr = from.getAs<StringAttr>(name);
    return attr ? attr.str() : std::string();
  };
  result.capturedFor = {part("device"), part("arch"), part("torch"),
                        getNumerics(from)};
}

LogicalResult PlanEmitter::emitMesh() {
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
  return success();
}

LogicalResult PlanEmitter::emitBuffer(BufferOp buffer) {
  bufferIndex[buffer.getSymNameAttr()] = result.buffers.size();
  auto spec = getSpec(buffer, cast<RankedTensorType>(buffer.getType()));
  if (failed(spec))
    return failure();
  result.buffers.push_back({buffer.getSymName().str(), *spec,
                            !buffer.getNonPersistent(),
                            getStrides(buffer.getStridesAttr())});
  return success();
}

std::optional<plan::Arena> PlanEmitter::getArena(StringRef name) {
  auto arena = module->getAttrOfType<DictionaryAttr>(name);
  if (!arena)
    return std::nullopt;
  auto part = [&](StringRef key) {
    auto bytes = arena.getAs<IntegerAttr>(key);
    return bytes ? bytes.getInt() : -1;
  };
  return plan::Arena{part("bytes"), part("lower_bound")};
}

LogicalResult PlanEmitter::emitParam(ParamOp param) {
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
    entry.unit = getUnit(param.getUnitAttr());
    entry.shardDim = int32_t(param.getShardingAttr().getShardedDim());
    result.units[entry.unit].params.push_back(index);
  }
  if (auto unit = param.getReducedWith())
    entry.reducedWith = unit->str();
  if (std::optional<Type> dtype = param.getComputeDtype())
    entry.computeDtype = getDType(*dtype);
  if (std::optional<Type> dtype = param.getGradDtype())
    entry.gradDtype = getDType(*dtype);
  result.params.push_back(std::move(entry));
  return success();
}

LogicalResult PlanEmitter::emitInputs() {
  for (auto [index, argument] :
       llvm::enumerate(program.getBody().getArguments())) {
    auto name = program.getArgAttrOfType<StringAttr>(index, inputNameAttrName);
    plan::Input input;
    input.name = name ? name.str() : "arg" + std::to_string(index);
    auto type = dyn_cast<RankedTensorType>(argument.getType());
    if (!type)
      return program.emitOpError("expected ranked tensors as arguments, got: ")
             << argument.getType();
    auto spec = getSpec(program, type);
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

//===----------------------------------------------------------------------===//
// Values
//===----------------------------------------------------------------------===//

FailureOr<plan::TensorSpec> PlanEmitter::getSpec(Operation *op,
                                                 RankedTensorType type) {
  std::optional<plan::DType> dtype = getDType(type.getElementType());
  if (!dtype || !type.hasStaticShape())
    return op->emitError("a plan has no tensor of type ") << type;
  ArrayRef<int64_t> shape = type.getShape();
  return plan::TensorSpec{{shape.begin(), shape.end()}, *dtype};
}

LogicalResult PlanEmitter::define(Value value, plan::ValueId &id) {
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
  result.values.back().offset = getOffset(value);
  origins.values.push_back(value);
  if (Value owner = getStorageOwner(value); owner != value)
    result.values.back().storage = use(owner);
  return success();
}

LogicalResult PlanEmitter::define(ValueRange values,
                                  std::vector<plan::ValueId> &ids) {
  for (Value value : values)
    if (failed(define(value, ids.emplace_back())))
      return failure();
  return success();
}

std::vector<plan::ValueId> PlanEmitter::use(ValueRange values) {
  std::vector<plan::ValueId> ids;
  for (Value value : values)
    ids.push_back(use(value));
  return ids;
}

void PlanEmitter::share(plan::ValueId in, plan::ValueId out) {
  plan::ValueId storage = result.values[in].storage;
  result.values[out].storage = storage == -1 ? in : storage;
}

std::vector<int32_t> PlanEmitter::getParams(ArrayAttr names) {
  std::vector<int32_t> indices;
  for (auto name : names.getAsRange<FlatSymbolRefAttr>())
    indices.push_back(getParam(name));
  return indices;
}
