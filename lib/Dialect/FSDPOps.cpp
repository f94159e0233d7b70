//===- FSDPOps.cpp - operations of the fsdp dialect -----------------------===//
//
// Parsers, printers and the verifiers that see one op and the symbols it
// names; those of collectives are in CollectiveOps.cpp. What needs the whole
// program is in ProgramVerifier.cpp.
//
//===----------------------------------------------------------------------===//
#include "SymbolChecks.h"

#include "fsdp/Dialect/Aten.h"
#include "fsdp/Plan/Plan.h"
#include "mlir/IR/Builders.h"
#include "mlir/Interfaces/FunctionImplementation.h"
#include "llvm/ADT/MapVector.h"

using namespace mlir;
using namespace mlir::fsdp;

//===----------------------------------------------------------------------===//
// Helpers shared by passes
//===----------------------------------------------------------------------===//

std::optional<Level> mlir::fsdp::getLevel(ModuleOp module) {
  if (auto level = module->getAttrOfType<LevelAttr>(levelAttrName))
    return level.getValue();
  return std::nullopt;
}

void mlir::fsdp::setLevel(ModuleOp module, Level level) {
  module->setAttr(levelAttrName, LevelAttr::get(module.getContext(), level));
}

LogicalResult mlir::fsdp::verifyLevel(ModuleOp module, Level expected,
                                      const llvm::Twine &user) {
  std::optional<Level> level = getLevel(module);
  if (!level || *level == expected)
    return success();
  return module.emitError()
         << user << ": expected a module at level " << stringifyLevel(expected)
         << ", got: " << stringifyLevel(*level);
}

ProgramOp mlir::fsdp::getProgram(ModuleOp module) {
  ProgramOp step, init, evaluation;
  for (auto program : module.getOps<ProgramOp>()) {
    bool isInit = program.getResultTypes().empty();
    bool isEvaluation = program.getEvaluation();
    ProgramOp &found = isInit ? init : isEvaluation ? evaluation : step;
    if (found) {
      program.emitOpError("expected one program ")
          << (isInit         ? "without a result"
              : isEvaluation ? "marked evaluation"
                             : "with a result")
          << " in the module, got another";
      return {};
    }
    found = program;
  }
  if (!step)
    module.emitError("expected an fsdp.program with a result in the module, "
                     "got none");
  return step;
}

ProgramOp mlir::fsdp::getEvaluationProgram(ModuleOp module) {
  for (auto program : module.getOps<ProgramOp>())
    if (program.getEvaluation())
      return program;
  return {};
}

ProgramOp mlir::fsdp::getInitProgram(ModuleOp module) {
  for (auto program : module.getOps<ProgramOp>())
    if (program.getResultTypes().empty())
      return program;
  return {};
}

llvm::MapVector<StringAttr, SmallVector<ParamOp>>
mlir::fsdp::getUnitParams(ModuleOp module) {
  llvm::MapVector<StringAttr, SmallVector<ParamOp>> units;
  for (auto unit : module.getOps<UnitOp>())
    units[unit.getSymNameAttr()];
  for (auto param : module.getOps<ParamOp>())
    if (FlatSymbolRefAttr unit = param.getUnitAttr())
      units[unit.getAttr()].push_back(param);
  return units;
}

/// Checks that `type` is the type of the parameter or buffer.
template <typename OpT>
static LogicalResult verifyDeclaredType(SymbolTableCollection &symbols,
                                        Operation *user, FlatSymbolRefAttr name,
                                        Type type, StringRef label) {
  auto declaration = lookup<OpT>(symbols, user, name, label);
  if (!declaration)
    return failure();
  if (type == declaration.getType())
    return success();
  return user->emitOpError(label) << ": expected " << declaration.getType()
                                  << " for " << name << ", got: " << type;
}

LogicalResult mlir::fsdp::verifyShardType(SymbolTableCollection &symbols,
                                          Operation *user,
                                          FlatSymbolRefAttr name, Type type,
                                          StringRef label) {
  auto param = lookup<ParamOp>(symbols, user, name, label);
  if (!param)
    return failure();
  ShardedType expected = param.getShardedType();
  if (!expected)
    return user->emitOpError(label)
           << ": expected " << name << " to have a sharding, it has none";
  if (type != expected)
    return user->emitOpError(label)
           << ": expected " << expected << " for " << name << ", got: " << type;
  return success();
}

bool mlir::fsdp::isPartialShardOf(SymbolTableCollection &symbols, Type type,
                                  ParamOp param) {
  auto sharded = dyn_cast<ShardedType>(type);
  if (!sharded || !sharded.isPartial() || !param.getSharding())
    return false;
  Type dtype = sharded.getTensor().getElementType();
  ArrayRef<Attribute> axes = sharded.getSharding().getPartial().getValue();
  auto mesh = symbols.lookupNearestSymbolFrom<MeshOp>(
      param, param.getShardingAttr().getMesh());
  return isa<FloatType, ComplexType>(dtype) && mesh &&
         llvm::all_of(
             axes,
             [&](Attribute axis) {
               return mesh.getMesh().getAxisSize(getAxisName(axis)).has_value();
             }) &&
         sharded == param.getPartialType(axes, dtype);
}

//===----------------------------------------------------------------------===//
// CheckpointPatternOp, ParamOp
//===----------------------------------------------------------------------===//

ShardedType ParamOp::getShardedType() {
  if (ShardingAttr sharding = getShardingAttr())
    return ShardedType::get(getContext(), getTensorType(), sharding);
  return {};
}

ShardedType ParamOp::getPartialType(ArrayRef<Attribute> axes, Type reduced) {
  ShardedType own = getShardedType();
  if (axes.empty())
    return own;
  return own.clone(own.getSharding().clonePartial(axes)).clone(reduced);
}

LogicalResult CheckpointPatternOp::verify() {
  if (getPattern().empty())
    return emitOpError("CheckpointPattern-1: expected a pattern, got: \"\"");
  ArrayAttr save = getSaveAttr();
  for (Attribute attr : save ? save.getValue() : ArrayRef<Attribute>()) {
    auto name = cast<StringAttr>(attr);
    if (name.getValue() == productsName)
      continue;
    auto [nameSpace, rest] = name.getValue().split("::");
    if (nameSpace.empty() || rest.empty())
      return emitOpError("CheckpointPattern-1: expected an operator of the "
                         "form \"namespace::name\" in save, got: \"")
             << name.getValue() << '"';
    auto [callee, every] = rest.split('/');
    int64_t number;
    if (rest.contains('/') &&
        (callee.empty() || every.getAsInteger(10, number) || number < 1))
      return emitOpError("CheckpointPattern-1: expected a positive number "
                         "after \"/\" in save, got: \"")
             << name.getValue() << '"';
  }
  return success();
}

static ParseResult parsePatterns(OpAsmParser &parser, ArrayAttr &patterns) {
  SmallVector<Attribute> parsed;
  if (parser.parseCommaSeparatedList([&] {
        std::string text;
        if (parser.parseString(&text))
          return failure();
        parsed.push_back(parser.getBuilder().getStringAttr(text));
        return success();
      }))
    return failure();
  patterns = parser.getBuilder().getArrayAttr(parsed);
  return success();
}

static void printPatterns(OpAsmPrinter &printer, Operation *,
                          ArrayAttr patterns) {
  llvm::interleaveComma(patterns, printer);
}

LogicalResult UnitPatternOp::verify() {
  if (getPatterns().empty())
    return emitOpError(
        "UnitPattern-1: expected at least one pattern, got none");
  if (getByClass() && getPatterns().size() != 1)
    return emitOpError("UnitPattern-1: expected one pattern of class names, "
                       "got: ")
           << getPatterns().size();
  if (getReshardAfterForward() && getPostForwardSize())
    return emitOpError("UnitPattern-2: expected reshard_after_forward or "
                       "post_forward_size, got both");
  bool hasRoot = llvm::any_of(
      getPatterns(), [](Attribute p) { return cast<StringAttr>(p).empty(); });
  if (hasRoot && (getByClass() || getPatterns().size() != 1))
    return emitOpError("UnitPattern-3: expected the pattern \"\" alone, not by "
                       "class");
  return success();
}

LogicalResult UnitOp::verify() {
  std::optional<int64_t> size = getPostForwardSize();
  if (size && (*size < 2 || !getReshardAfterForward()))
    return emitOpError("Unit-1: expected a post_forward_size of at least 2, in "
                       "a unit that is resharded after forward, got: ")
           << *size;
  return success();
}

LogicalResult ParamOp::verify() {
  RankedTensorType type = getTensorType();
  if (ShardingAttr sharding = getShardingAttr();
      sharding && sharding.getPartial())
    return emitOpError("Param-6: expected a sharding that is partial along no "
                       "axis, got: ")
           << sharding;
  if (getIgnored()) {
    if (getUnitAttr() || getShardingAttr())
      return emitOpError("Param-4: expected no unit and no sharding of an "
                         "ignored parameter");
    if (type.hasStaticShape())
      return success();
  }
  // Before units are assigned, nothing says that a parameter is ignored.
  bool inUnit = getUnitAttr() || getShardingAttr();
  if ((type.getRank() == 0 && inUnit) || !type.hasStaticShape())
    return emitOpError("Param-3: expected a static shape with at least one "
                       "dimension, got: ")
           << type;
  if (ShardingAttr sharding = getShardingAttr();
      sharding &&
      static_cast<int64_t>(sharding.getDims().size()) != type.getRank())
    return emitOpError("Sharded-1: expected a sharding of ")
           << type.getRank()
           << " dimensions, got: " << sharding.getDims().size();
  return success();
}

bool mlir::fsdp::areDense(ArrayRef<int64_t> shape, ArrayRef<int64_t> strides) {
  return shape.size() == strides.size() &&
         llvm::all_of(strides, [](int64_t s) { return s >= 0; }) &&
         ::fsdp::plan::areDense({shape.begin(), shape.end()},
                                {strides.begin(), strides.end()});
}

LogicalResult BufferOp::verify() {
  auto type = cast<RankedTensorType>(getType());
  if (auto strides = getStrides();
      strides && !areDense(type.getShape(), *strides))
    return emitOpError("Buffer-1: expected dense strides of ")
           << type << ", got: " << getStridesAttr();
  return success();
}

LogicalResult ParamOp::verifySymbolUses(SymbolTableCollection &symbols) {
  if (FlatSymbolRefAttr name = getUnitAttr()) {
    auto unit = lookup<UnitOp>(symbols, *this, name, "Param-1");
    if (!unit)
      return failure();
    Type own = getTensorType().getElementType();
    MixedPrecisionAttr policy = unit.getMixedPrecisionAttr();
    Type expected = policy ? policy.getComputeDtype(own) : own;
    if (Type dtype = getComputeType().getElementType(); dtype != expected)
      return emitOpError("Param-5: expected compute_dtype ")
             << expected << " as unit " << name << " says, got: " << dtype;
  }
  ShardingAttr sharding = getShardingAttr();
  if (!sharding)
    return success();
  auto mesh = lookup<MeshOp>(symbols, *this, sharding.getMesh(), "Param-2");
  if (!mesh)
    return failure();
  for (Attribute axes : sharding.getDims())
    for (Attribute axis : cast<ArrayAttr>(axes))
      if (!isa<StringAttr>(axis) ||
          !mesh.getMesh().getAxisSize(getAxisName(axis)))
        return emitOpError("Param-2: expected axis ")
               << axis << " in mesh " << sharding.getMesh()
               << ", which has: " << mesh.getMesh();
  return success();
}

//===----------------------------------------------------------------------===//
// ProgramOp, ReturnOp
//===----------------------------------------------------------------------===//

ParseResult ProgramOp::parse(OpAsmParser &parser, OperationState &result) {
  auto buildType = [](Builder &builder, ArrayRef<Type> inputs,
                      ArrayRef<Type> results,
                      function_interface_impl::VariadicFlag, std::string &) {
    return builder.getFunctionType(inputs, results);
  };
  return function_interface_impl::parseFunctionOp(
      parser, result, /*allowVariadic=*/false,
      getFunctionTypeAttrName(result.name), buildType,
      getArgAttrsAttrName(result.name), getResAttrsAttrName(result.name));
}

void ProgramOp::print(OpAsmPrinter &printer) {
  function_interface_impl::printFunctionOp(
      printer, *this, /*isVariadic=*/false, getFunctionTypeAttrName(),
      getArgAttrsAttrName(), getResAttrsAttrName());
}

LogicalResult ReturnOp::verify() {
  auto program = cast<ProgramOp>((*this)->getParentOp());
  ArrayRef<Type> results = program.getFunctionType().getResults();
  if (!getLoss()) {
    if (results.empty())
      return success();
    return emitOpError("expected the loss of the program, whose result is ")
           << results[0] << ", got none";
  }
  if (results.size() != 1 || results[0] != getLoss().getType())
    return emitOpError("expected the result type of the program, got: ")
           << getLoss().getType();
  return success();
}

//===----------------------------------------------------------------------===//
// State
//===----------------------------------------------------------------------===//

LogicalResult ReadOp::verifySymbolUses(SymbolTableCollection &symbols) {
  auto param = lookup<ParamOp>(symbols, *this, getParamAttr(), "Read-1");
  if (!param)
    return failure();
  Type type = getResult().getType();
  if (type == param.getComputeType() || type == param.getShardedType())
    return success();
  InFlightDiagnostic diag = emitOpError("Read-1: expected ")
                            << param.getComputeType();
  if (Type sharded = param.getShardedType())
    diag << " or " << sharded;
  return diag << " for " << getParamAttr() << ", got: " << type;
}

LogicalResult ReadBufferOp::verifySymbolUses(SymbolTableCollection &symbols) {
  return verifyDeclaredType<BufferOp>(symbols, *this, getBufferAttr(),
                                      getResult().getType(), "ReadBuffer-1");
}

LogicalResult WriteParamOp::verifySymbolUses(SymbolTableCollection &symbols) {
  return verifyDeclaredType<ParamOp>(symbols, *this, getParamAttr(),
                                     getValue().getType(), "WriteParam-1");
}

LogicalResult WriteBufferOp::verifySymbolUses(SymbolTableCollection &symbols) {
  return verifyDeclaredType<BufferOp>(symbols, *this, getBufferAttr(),
                                      getValue().getType(), "WriteBuffer-1");
}

LogicalResult GradientsOp::verify() {
  if (getParamNames().size() != getGrads().size())
    return emitOpError("Gradients-1: expected ")
           << getParamNames().size()
           << " gradients, got: " << getGrads().size();
  if (!isa_and_nonnull<ReturnOp>((*this)->getNextNode()))
    return emitOpError("Gradients-2: expected fsdp.return to follow");
  return success();
}

LogicalResult GradientsOp::verifySymbolUses(SymbolTableCollection &symbols) {
  Operation *previous = nullptr;
  for (auto [nameAttr, grad] : llvm::zip(getParamNames(), getGrads())) {
    auto name = cast<FlatSymbolRefAttr>(nameAttr);
    auto param = lookup<ParamOp>(symbols, *this, name, "Gradients-1");
    if (!param)
      return failure();
    if (previous && !previous->isBeforeInBlock(param))
      return emitOpError("Gradients-1: expected each parameter once, in the "
                         "order of the module, got ")
             << name << " too late";
    previous = param;
    UnitOp unit;
    if (FlatSymbolRefAttr unitName = param.getUnitAttr())
      unit = symbols.lookupNearestSymbolFrom<UnitOp>(*this, unitName);
    Type type = grad.getType();
    if (type != param.getGradType() && type != param.getShardedType() &&
        type != getAccumulatedType(param, unit) &&
        !isPartialShardOf(symbols, type, param))
      return emitOpError("Gradients-1: expected ")
             << param.getGradType() << " or its part of the mesh for " << name
             << ", got: " << type;
  }
  return success();
}

LogicalResult NoGradientOp::verifySymbolUses(SymbolTableCollection &symbols) {
  llvm::DenseSet<StringAttr> seen;
  for (auto name : getParamNames().getAsRange<FlatSymbolRefAttr>()) {
    auto param = lookup<ParamOp>(symbols, *this, name, "NoGradient-1");
    if (!param)
      return failure();
    if (param.getFrozen() || !seen.insert(name.getAttr()).second)
      return emitOpError("NoGradient-1: expected ")
             << name
             << (param.getFrozen() ? " not to be frozen" : " to be named once");
  }
  return success();
}

LogicalResult
OptimizerStepOp::verifySymbolUses(SymbolTableCollection &symbols) {
  if (getParamNames().size() != getGrads().size())
    return emitOpError("OptimizerStep-1: expected ")
           << getParamNames().size()
           << " gradients, got: " << getGrads().size();
  for (auto [nameAttr, grad] : llvm::zip(getParamNames(), getGrads())) {
    auto name = cast<FlatSymbolRefAttr>(nameAttr);
    auto param = symbols.lookupNearestSymbolFrom<ParamOp>(*this, name);
    if (param && param.getIgnored()
            ? failed(verifyDeclaredType<ParamOp>(
                  symbols, *this, name, grad.getType(), "OptimizerStep-1"))
            : failed(verifyShardType(symbols, *this, name, grad.getType(),
                                     "OptimizerStep-1")))
      return failure();
  }
  auto module = (*this)->getParentOfType<ModuleOp>();
  auto optimizers = module.getOps<OptimizerOp>();
  if (std::distance(optimizers.begin(), optimizers.end()) != 1)
    return emitOpError("OptimizerStep-2: expected one fsdp.optimizer in the "
                       "module, got: ")
           << std::distance(optimizers.begin(), optimizers.end());
  std::optional<ArrayRef<int64_t>> groups = getGroups();
  if (!groups)
    return success();
  auto declared = module.getOps<ParamGroupOp>();
  int64_t last = std::distance(declared.begin(), declared.end());
  if (groups->size() != getGrads().size() ||
      llvm::any_of(*groups,
                   [&](int64_t group) { return group < 0 || group > last; }))
    return emitOpError("OptimizerStep-3: expected ")
           << getGrads().size() << " groups from 0 to " << last
           << ", got: " << getGroupsAttr();
  return success();
}

#define GET_OP_CLASSES
#include "fsdp/Dialect/FSDPOps.cpp.inc"
