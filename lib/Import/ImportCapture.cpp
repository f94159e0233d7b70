//===- ImportCapture.cpp - a Capture to the captured level ----------------===//
#include "fsdp/Dialect/Aten.h"
#include "fsdp/Dialect/FSDP.h"
#include "fsdp/Dialect/ModelParallel.h"
#include "fsdp/Dialect/Storages.h"
#include "fsdp/Dialect/UnitEntries.h"
#include "fsdp/Import/Import.h"

#include "mlir/IR/Builders.h"
#include "llvm/ADT/DenseMap.h"

using namespace mlir;
using namespace mlir::fsdp;
namespace plan = ::fsdp::plan;

namespace {
class Importer {
public:
  Importer(const ::fsdp::Capture &capture, MLIRContext *context)
      : capture(capture), builder(context) {}

  OwningOpRef<ModuleOp> run() {
    Location unknown = builder.getUnknownLoc();
    OwningOpRef<ModuleOp> module = ModuleOp::create(builder, unknown);
    setLevel(*module, Level::Captured);
    (*module)->setAttr(modelAttrName, builder.getStringAttr(capture.model));
    if (!capture.capturedFor.device.empty())
      setCapturedFor(*module);
    if (capture.modelParallel)
      (*module)->setAttr(modelParallelAttrName,
                         getAttr(*capture.modelParallel, builder.getContext()));
    if (!capture.weights.path.empty()) {
      (*module)->setAttr(weightsAttrName,
                         builder.getStringAttr(capture.weights.path));
      (*module)->setAttr(weightsHashAttrName,
                         builder.getStringAttr(capture.weights.hash));
    }
    SmallVector<NamedAttribute> classes;
    for (const auto &[name, className] : capture.modules)
      if (!name.empty())
        classes.push_back(
            builder.getNamedAttr(name, builder.getStringAttr(className)));
    (*module)->setAttr(moduleClassesAttrName,
                       builder.getDictionaryAttr(classes));
    if (!capture.precision.empty())
      (*module)->setAttr(capturedPrecisionAttrName, getPrecision());
    if (!capture.entries.empty())
      setEntries(*module);
    builder.setInsertionPointToEnd(module->getBody());
    importDeclarations();
    importStep();
    if (capture.init) {
      builder.setInsertionPointToEnd(module->getBody());
      importInit(*capture.init);
    }
    if (capture.evaluation) {
      builder.setInsertionPointToEnd(module->getBody());
      importEvaluation(*capture.evaluation);
    }
    return module;
  }

private:
  void setCapturedFor(ModuleOp module) {
    const plan::CapturedFor &from = capture.capturedFor;
    NamedAttrList texts;
    texts.append("device", builder.getStringAttr(from.device));
    if (!from.arch.empty())
      texts.append("arch", builder.getStringAttr(from.arch));
    texts.append("torch", builder.getStringAttr(from.torch));
    NamedAttrList numerics;
    for (const auto &[name, value] : from.numerics)
      numerics.append(name, builder.getStringAttr(value));
    if (!numerics.empty())
      texts.append("numerics", numerics.getDictionary(builder.getContext()));
    module->setAttr(capturedForAttrName,
                    texts.getDictionary(builder.getContext()));
  }

  void setEntries(ModuleOp module) {
    SmallVector<Attribute> units;
    for (const std::vector<std::string> &unit : capture.units) {
      SmallVector<StringRef> names(unit.begin(), unit.end());
      units.push_back(builder.getStrArrayAttr(names));
    }
    SmallVector<NamedAttribute> entries;
    for (const auto &[name, input] : capture.entries)
      entries.push_back(
          builder.getNamedAttr(name, builder.getStringAttr(input)));
    module->setAttr(capturedUnitsAttrName, builder.getArrayAttr(units));
    module->setAttr(entriesAttrName, builder.getDictionaryAttr(entries));
  }

  DictionaryAttr getPrecision() {
    SmallVector<NamedAttribute> policies;
    auto type = [&](std::optional<plan::DType> dtype) {
      return dtype ? getElementType(*dtype) : Type();
    };
    for (const ::fsdp::CapturedPrecision &policy : capture.precision)
      policies.push_back(builder.getNamedAttr(
          policy.module.empty() ? StringRef(rootUnitName)
                                : StringRef(policy.module),
          MixedPrecisionAttr::get(builder.getContext(), type(policy.paramDtype),
                                  type(policy.reduceDtype),
                                  type(policy.outputDtype),
                                  policy.castForwardInputs)));
    return builder.getDictionaryAttr(policies);
  }

  /// The dtype of each gradient that does not come in the compute dtype.
  llvm::DenseMap<size_t, TypeAttr> getGradDtypes() {
    llvm::DenseMap<plan::ValueId, plan::DType> dtypes;
    for (const ::fsdp::CapturedCall &call : capture.calls)
      for (auto [value, spec] : llvm::zip(call.outValues, call.outs))
        dtypes[value] = spec.dtype;
    llvm::DenseMap<size_t, TypeAttr> result;
    for (auto [param, grad] : capture.grads)
      if (auto it = dtypes.find(grad);
          it != dtypes.end() &&
          it->second != capture.params[param].computeDtype)
        result[param] = TypeAttr::get(getElementType(it->second));
    return result;
  }

  void importDeclarations() {
    llvm::DenseMap<size_t, TypeAttr> gradDtypes = getGradDtypes();
    bool isInOrder =
        llvm::is_sorted(capture.params, [](const auto &a, const auto &b) {
          return a.position < b.position;
        });
    for (auto [index, param] : llvm::enumerate(capture.params)) {
      ArrayAttr aliases;
      if (!param.aliases.empty()) {
        SmallVector<StringRef> names(param.aliases.begin(),
                                     param.aliases.end());
        aliases = builder.getStrArrayAttr(names);
      }
      ParamOp::create(
          builder, getLoc(param.name, "", -1), param.name, getType(param.spec),
          FlatSymbolRefAttr(), ShardingAttr(), aliases, !param.requiresGrad,
          /*ignored=*/false,
          param.computeDtype == param.spec.dtype
              ? TypeAttr()
              : TypeAttr::get(getElementType(param.computeDtype)),
          gradDtypes.lookup(index),
          isInOrder ? IntegerAttr() : builder.getI64IntegerAttr(param.position),
          param.postBackward ? builder.getI64IntegerAttr(param.postBackward)
                             : IntegerAttr(),
          /*reduced_with=*/StringAttr());
    }
    for (const plan::Buffer &buffer : capture.buffers)
      BufferOp::create(builder, getLoc(buffer.name, "", -1), buffer.name,
                       getType(buffer.spec), !buffer.persistent,
                       getStrides(buffer.strides));
  }

  void importStep() {
    SmallVector<Type> inputTypes;
    SmallVector<Attribute> inputAttrs;
    for (const plan::Input &input : capture.inputs) {
      inputTypes.push_back(getType(input.spec));
      SmallVector<NamedAttribute> attrs{builder.getNamedAttr(
          inputNameAttrName, builder.getStringAttr(input.name))};
      if (getElementType(input.spec.dtype).isInteger()) {
        attrs.push_back(builder.getNamedAttr(
            inputLowAttrName, builder.getI64IntegerAttr(input.low)));
        attrs.push_back(builder.getNamedAttr(
            inputHighAttrName, builder.getI64IntegerAttr(input.high)));
      }
      if (DenseI64ArrayAttr strides = getStrides(input.strides))
        attrs.push_back(builder.getNamedAttr(inputStridesAttrName, strides));
      inputAttrs.push_back(builder.getDictionaryAttr(attrs));
    }
    auto type = builder.getFunctionType(
        inputTypes, getType(getLossSpec(capture.calls, capture.loss)));
    auto program = ProgramOp::create(
        builder, builder.getUnknownLoc(), "train_step", type,
        /*evaluation=*/false, builder.getArrayAttr(inputAttrs), nullptr);
    addInputs(program);

    importReads(capture.calls);
    PhaseOp::create(builder, builder.getUnknownLoc(), Phase::Forward);
    for (auto [index, call] : llvm::enumerate(capture.calls)) {
      if (index == capture.backwardBegin)
        PhaseOp::create(builder, builder.getUnknownLoc(), Phase::Backward);
      importCall(call);
    }
    importGradients();
    ReturnOp::create(builder, builder.getUnknownLoc(), values[capture.loss]);
  }

  void importGradients() {
    llvm::DenseMap<size_t, plan::ValueId> gradOf;
    for (auto [param, value] : capture.grads)
      gradOf[param] = value;
    SmallVector<Attribute> names, without;
    SmallVector<Value> grads;
    for (auto [index, param] : llvm::enumerate(capture.params)) {
      auto name = FlatSymbolRefAttr::get(builder.getContext(), param.name);
      auto grad = gradOf.find(index);
      if (grad != gradOf.end()) {
        names.push_back(name);
        grads.push_back(values[grad->second]);
      } else if (param.requiresGrad) {
        without.push_back(name);
      }
    }
    if (!without.empty())
      NoGradientOp::create(builder, builder.getUnknownLoc(),
                           builder.getArrayAttr(without));
    GradientsOp::create(builder, builder.getUnknownLoc(),
                        builder.getArrayAttr(names), grads);
  }

  void importInit(const ::fsdp::CapturedInit &init) {
    values.clear();
    auto program = ProgramOp::create(builder, builder.getUnknownLoc(), "init",
                                     builder.getFunctionType({}, {}),
                                     /*evaluation=*/false, nullptr, nullptr);
    Block *body = builder.createBlock(&program.getBody());
    for (const ::fsdp::CapturedCall &call : init.calls)
      importCall(call);

    // Each value is written, and can end, right after the last op that touches
    // its storage.
    llvm::DenseMap<Value, Operation *> lastTouch;
    for (Operation &op : *body) {
      for (Value operand : op.getOperands())
        lastTouch[getStorageOwner(operand)] = &op;
      for (Value result : op.getResults())
        lastTouch[getStorageOwner(result)] = &op;
    }
    auto moveAfterLastTouch = [&](Operation *write, Value value) {
      write->moveAfter(lastTouch.lookup(getStorageOwner(value)));
    };
    for (auto [param, value] : init.params) {
      const std::string &name = capture.params[param].name;
      moveAfterLastTouch(WriteParamOp::create(builder, getLoc(name, "", -1),
                                              name, values[value]),
                         values[value]);
    }
    for (auto [buffer, value] : init.buffers) {
      const std::string &name = capture.buffers[buffer].name;
      moveAfterLastTouch(WriteBufferOp::create(builder, getLoc(name, "", -1),
                                               name, values[value]),
                         values[value]);
    }
    ReturnOp::create(builder, builder.getUnknownLoc(), Value());
  }

  void importEvaluation(const ::fsdp::CapturedEvaluation &evaluation) {
    values.clear();
    SmallVector<Type> inputTypes;
    for (const plan::Input &input : capture.inputs)
      inputTypes.push_back(getType(input.spec));
    auto type = builder.getFunctionType(
        inputTypes, getType(getLossSpec(evaluation.calls, evaluation.loss)));
    auto program =
        ProgramOp::create(builder, builder.getUnknownLoc(), "evaluate", type,
                          /*evaluation=*/true, nullptr, nullptr);
    addInputs(program);
    importReads(evaluation.calls);
    for (const ::fsdp::CapturedCall &call : evaluation.calls)
      importCall(call);
    ReturnOp::create(builder, builder.getUnknownLoc(), values[evaluation.loss]);
  }

  void addInputs(ProgramOp program) {
    Block *body = builder.createBlock(&program.getBody());
    for (const plan::Input &input : capture.inputs)
      values[input.value] =
          body->addArgument(getType(input.spec), builder.getUnknownLoc());
  }

  static plan::TensorSpec
  getLossSpec(const std::vector<::fsdp::CapturedCall> &calls,
              plan::ValueId loss) {
    for (const ::fsdp::CapturedCall &call : calls)
      for (auto [value, spec] : llvm::zip(call.outValues, call.outs))
        if (value == loss)
          return spec;
    return {};
  }

  /// Reads of the parameters and buffers that calls use.
  void importReads(const std::vector<::fsdp::CapturedCall> &calls) {
    llvm::DenseSet<plan::ValueId> used;
    for (const ::fsdp::CapturedCall &call : calls)
      collectUses(call.args, used);
    plan::ValueId next = 0;
    for (const ::fsdp::CapturedParam &param : capture.params) {
      if (used.contains(next))
        values[next] = ReadOp::create(builder, getLoc(param.name, "", -1),
                                      getType(param.computeSpec()), param.name);
      ++next;
    }
    for (const plan::Buffer &buffer : capture.buffers) {
      if (used.contains(next))
        values[next] =
            ReadBufferOp::create(builder, getLoc(buffer.name, "", -1),
                                 getType(buffer.spec), buffer.name);
      ++next;
    }
  }

  static void collectUses(const plan::ArgList &args,
                          llvm::DenseSet<plan::ValueId> &used) {
    for (const plan::Arg &arg : args) {
      if (const auto *tensor = std::get_if<plan::TensorArg>(&arg.value))
        used.insert(tensor->value);
      else if (const auto *list = std::get_if<plan::ArgList>(&arg.value))
        collectUses(*list, used);
    }
  }

  void importCall(const ::fsdp::CapturedCall &call) {
    SmallVector<Value> operands;
    SmallVector<Attribute> args;
    for (const plan::Arg &arg : call.args)
      args.push_back(getArg(arg, operands));
    SmallVector<Type> results;
    for (const plan::TensorSpec &out : call.outs)
      results.push_back(getType(out));
    bool hasViews = llvm::any_of(call.views, [](int64_t v) { return v >= 0; });
    std::string callee = call.op;
    if (!call.overload.empty())
      callee += "." + call.overload;
    auto op = aten::CallOp::create(
        builder, getLoc(call.module, call.file, call.line), results, callee,
        operands, builder.getArrayAttr(args),
        hasViews ? builder.getDenseI64ArrayAttr(call.views) : nullptr,
        call.mutates.empty() ? nullptr
                             : builder.getDenseI64ArrayAttr(call.mutates),
        call.random, FlatSymbolRefAttr(), /*recompute=*/false,
        getResultStrides(call),
        call.schema.empty() ? nullptr : builder.getStringAttr(call.schema));
    setSource(op, call);
    for (auto [value, result] : llvm::zip(call.outValues, op.getResults()))
      values[value] = result;
  }

  /// The last folder of the file's path is enough for a reader, and is the same
  /// on every machine.
  void setSource(aten::CallOp op, const ::fsdp::CapturedCall &call) {
    NamedAttrList source;
    if (!call.module.empty())
      source.set(moduleAttrName, builder.getStringAttr(call.module));
    if (hasLine(call.file, call.line)) {
      StringRef path = call.file;
      size_t slash = path.rfind('/');
      if (slash != StringRef::npos)
        slash = path.rfind('/', slash);
      source.set(lineAttrName, builder.getStringAttr(path.substr(slash + 1) +
                                                     ":" + Twine(call.line)));
    }
    op->setDiscardableAttrs(source.getDictionary(builder.getContext()));
  }

  /// Null for a row-major tensor.
  DenseI64ArrayAttr getStrides(const plan::Strides &strides) {
    return strides.empty() ? nullptr : builder.getDenseI64ArrayAttr(strides);
  }

  /// Null where all results are row-major.
  ArrayAttr getResultStrides(const ::fsdp::CapturedCall &call) {
    if (llvm::all_of(call.outStrides,
                     [](const plan::Strides &s) { return s.empty(); }))
      return nullptr;
    SmallVector<Attribute> entries;
    for (const plan::Strides &strides : call.outStrides)
      entries.push_back(builder.getDenseI64ArrayAttr(strides));
    return builder.getArrayAttr(entries);
  }

  Attribute getArg(const plan::Arg &arg, SmallVectorImpl<Value> &operands) {
    return std::visit(
        [&](const auto &value) -> Attribute {
          using T = std::decay_t<decltype(value)>;
          if constexpr (std::is_same_v<T, plan::NoneArg>) {
            return aten::NoneAttr::get(builder.getContext());
          } else if constexpr (std::is_same_v<T, plan::DeviceArg>) {
            return aten::DeviceAttr::get(builder.getContext());
          } else if constexpr (std::is_same_v<T, plan::TensorArg>) {
            operands.push_back(values.lookup(value.value));
            return builder.getUnitAttr();
          } else if constexpr (std::is_same_v<T, bool>) {
            return builder.getBoolAttr(value);
          } else if constexpr (std::is_same_v<T, int64_t>) {
            return builder.getI64IntegerAttr(value);
          } else if constexpr (std::is_same_v<T, double>) {
            return builder.getF64FloatAttr(value);
          } else if constexpr (std::is_same_v<T, std::complex<double>>) {
            return aten::ComplexAttr::get(
                builder.getContext(), builder.getF64FloatAttr(value.real()),
                builder.getF64FloatAttr(value.imag()));
          } else if constexpr (std::is_same_v<T, std::string>) {
            return builder.getStringAttr(value);
          } else {
            SmallVector<Attribute> elements;
            for (const plan::Arg &element : value)
              elements.push_back(getArg(element, operands));
            return builder.getArrayAttr(elements);
          }
        },
        arg.value);
  }

  RankedTensorType getType(const plan::TensorSpec &spec) {
    return RankedTensorType::get(spec.shape, getElementType(spec.dtype));
  }

  Type getElementType(plan::DType dtype) {
    switch (dtype) {
    case plan::DType::Float32:
      return builder.getF32Type();
    case plan::DType::Float64:
      return builder.getF64Type();
    case plan::DType::Float16:
      return builder.getF16Type();
    case plan::DType::BFloat16:
      return builder.getBF16Type();
    case plan::DType::Int64:
      return builder.getI64Type();
    case plan::DType::Int32:
      return builder.getI32Type();
    case plan::DType::Int16:
      return builder.getI16Type();
    case plan::DType::Int8:
      return builder.getI8Type();
    case plan::DType::UInt8:
      return builder.getIntegerType(8, /*isSigned=*/false);
    case plan::DType::Bool:
      return builder.getI1Type();
    case plan::DType::UInt16:
      return builder.getIntegerType(16, /*isSigned=*/false);
    case plan::DType::UInt32:
      return builder.getIntegerType(32, /*isSigned=*/false);
    case plan::DType::UInt64:
      return builder.getIntegerType(64, /*isSigned=*/false);
    case plan::DType::Float8E4M3FN:
      return Float8E4M3FNType::get(builder.getContext());
    case plan::DType::Float8E5M2:
      return Float8E5M2Type::get(builder.getContext());
    case plan::DType::Complex32:
      return ComplexType::get(builder.getF16Type());
    case plan::DType::Complex64:
      return ComplexType::get(builder.getF32Type());
    case plan::DType::Complex128:
      return ComplexType::get(builder.getF64Type());
    }
    llvm_unreachable("all element types are listed");
  }

  static bool hasLine(StringRef file, int64_t line) {
    return !file.empty() && line > 0;
  }

  /// For errors alone.
  Location getLoc(StringRef module, StringRef file, int64_t line) {
    Location source = builder.getUnknownLoc();
    if (hasLine(file, line))
      source = FileLineColLoc::get(builder.getContext(), file, line, 0);
    return NameLoc::get(builder.getStringAttr(module), source);
  }

  const ::fsdp::Capture &capture;
  OpBuilder builder;
  llvm::DenseMap<plan::ValueId, Value> values;
};
} // namespace

OwningOpRef<ModuleOp> mlir::fsdp::importCapture(const ::fsdp::Capture &capture,
                                                MLIRContext *context) {
  context->loadDialect<FSDPDialect, aten::AtenDialect>();
  return Importer(capture, context).run();
}
