//===- OpAttributes.cpp - attributes that ops of all kinds have -----------===//
#include "fsdp/Dialect/Aten.h"
#include "fsdp/Dialect/FSDP.h"
#include "fsdp/Dialect/ModelParallel.h"

using namespace mlir;
using namespace mlir::fsdp;

static StringRef getText(Operation *op, StringRef name) {
  auto text = dyn_cast_or_null<StringAttr>(op->getDiscardableAttr(name));
  return text ? text.getValue() : StringRef();
}

/// "sm_90".
static bool isArchitecture(Attribute attribute) {
  auto text = dyn_cast<StringAttr>(attribute);
  StringRef name = text ? text.getValue() : StringRef();
  return name.consume_front("sm_") && !name.empty() &&
         llvm::all_of(name, llvm::isDigit);
}

StringRef mlir::fsdp::getModuleName(Operation *op) {
  return getText(op, moduleAttrName);
}

int64_t mlir::fsdp::getOffset(Value value) {
  if (auto argument = dyn_cast<BlockArgument>(value)) {
    auto program = dyn_cast<ProgramOp>(argument.getOwner()->getParentOp());
    auto offset = program ? program.getArgAttrOfType<IntegerAttr>(
                                argument.getArgNumber(), offsetAttrName)
                          : IntegerAttr();
    return offset ? offset.getInt() : -1;
  }
  auto offsets =
      value.getDefiningOp()->getAttrOfType<DenseI64ArrayAttr>(offsetsAttrName);
  return offsets ? offsets[cast<OpResult>(value).getResultNumber()] : -1;
}

StringRef mlir::fsdp::getSourceLine(Operation *op) {
  return getText(op, lineAttrName);
}

void mlir::fsdp::copyOrigin(Operation *origin, Operation *op) {
  auto copy = [&](StringRef name) {
    if (Attribute text = origin->getDiscardableAttr(name))
      op->setDiscardableAttr(name, text);
  };
  copy(moduleAttrName);
  if (isa<aten::CallOp, FusedOp>(op))
    copy(lineAttrName);
}

void mlir::fsdp::setReason(Operation *op, const llvm::Twine &why) {
  op->setDiscardableAttr(whyAttrName, StringAttr::get(op->getContext(), why));
}

StringRef mlir::fsdp::getReason(Operation *op) {
  return getText(op, whyAttrName);
}

static LogicalResult verifyText(Operation *op, NamedAttribute attribute,
                                StringRef label) {
  auto text = dyn_cast<StringAttr>(attribute.getValue());
  if (text && !text.empty())
    return success();
  return op->emitOpError(label)
         << ": expected a string as " << attribute.getName().getValue()
         << ", got: " << attribute.getValue();
}

static bool isEvent(Attribute attribute) {
  auto event = dyn_cast<IntegerAttr>(attribute);
  return event && event.getType().isInteger(32) && event.getInt() >= 0;
}

static bool isEvents(Attribute attribute) {
  auto events = dyn_cast<DenseI32ArrayAttr>(attribute);
  return events && llvm::all_of(events.asArrayRef(),
                                [](int32_t event) { return event >= 0; });
}

::fsdp::plan::Numerics mlir::fsdp::getNumerics(DictionaryAttr capturedFor) {
  ::fsdp::plan::Numerics numerics;
  if (auto settings = capturedFor.getAs<DictionaryAttr>("numerics"))
    for (NamedAttribute setting : settings) {
      // What is no text has no value that findDefect knows.
      auto text = dyn_cast<StringAttr>(setting.getValue());
      numerics[setting.getName().str()] = text ? text.str() : "";
    }
  return numerics;
}

LogicalResult FSDPDialect::verifyOperationAttribute(Operation *op,
                                                    NamedAttribute attribute) {
  StringAttr name = attribute.getName();
  // What most ops have comes first.
  if (name == moduleAttrName || name == lineAttrName)
    return verifyText(op, attribute, "Origin-1");
  if (name == whyAttrName)
    return verifyText(op, attribute, "Why-1");
  if (name == levelAttrName) {
    if (isa<ModuleOp>(op) && isa<LevelAttr>(attribute.getValue()))
      return success();
    return op->emitOpError("Level-1: expected ")
           << levelAttrName
           << " on the module, an #fsdp.level, got: " << attribute.getValue();
  }
  if (name == capturedForAttrName) {
    auto texts = dyn_cast<DictionaryAttr>(attribute.getValue());
    if (texts)
      if (std::string defect = ::fsdp::plan::findDefect(getNumerics(texts));
          !defect.empty())
        return op->emitOpError("Captured-2: ") << defect;
    Attribute arch = texts ? texts.get("arch") : Attribute();
    if (isa<ModuleOp>(op) && texts && texts.getAs<StringAttr>("device") &&
        texts.getAs<StringAttr>("torch") && (!arch || isArchitecture(arch)))
      return success();
    return op->emitOpError("Captured-1: expected ")
           << capturedForAttrName
           << " on the module, with the strings device and torch, and of a "
              "GPU an arch such as sm_90, got: "
           << attribute.getValue();
  }
  if (name == modelParallelAttrName) {
    auto parallel = dyn_cast<DictionaryAttr>(attribute.getValue());
    auto read = parallel ? readModelParallel(parallel) : std::nullopt;
    if (!isa<ModuleOp>(op) || !read)
      return op->emitOpError("Axis-1: expected ")
             << modelParallelAttrName
             << " on the module, with the numbers ranks and data_stride, and "
                "axes of a name, ranks and stride, got: "
             << attribute.getValue();
    if (std::string defect = ::fsdp::plan::findDefect(*read); !defect.empty())
      return op->emitOpError("Axis-1: ") << defect;
    return success();
  }
  if (name == memoryAttrName) {
    auto memory = dyn_cast<StringAttr>(attribute.getValue());
    if (isa<ModuleOp>(op) && memory &&
        (memory.getValue() == "shared" || memory.getValue() == "device"))
      return success();
    return op->emitOpError("Memory-1: expected ")
           << memoryAttrName
           << " on the module, \"shared\" or \"device\", got: "
           << attribute.getValue();
  }
  if (name == offsetsAttrName) {
    auto offsets = dyn_cast<DenseI64ArrayAttr>(attribute.getValue());
    if (offsets && size_t(offsets.size()) == op->getNumResults() &&
        llvm::all_of(offsets.asArrayRef(), [](int64_t o) { return o >= -1; }))
      return success();
    return op->emitOpError("Offset-1: expected a byte offset for each result, "
                           "or -1, got: ")
           << attribute.getValue();
  }
  if (name == arenaAttrName || name == hostArenaAttrName) {
    auto arena = dyn_cast<DictionaryAttr>(attribute.getValue());
    if (isa<ModuleOp>(op) && arena && arena.getAs<IntegerAttr>("bytes") &&
        arena.getAs<IntegerAttr>("lower_bound"))
      return success();
    return op->emitOpError("Arena-1: expected ")
           << name.getValue()
           << " on the module, with the integers bytes and lower_bound, got: "
           << attribute.getValue();
  }
  if (name == streamAttrName && !isa<StringAttr>(attribute.getValue()))
    return op->emitOpError("Stream-1: expected the name of a stream, got: ")
           << attribute.getValue();
  if (name == waitsAttrName && !isEvents(attribute.getValue()))
    return op->emitOpError("Stream-1: expected an array<i32> of events, got: ")
           << attribute.getValue();
  if (name == recordsAttrName && !isEvent(attribute.getValue()))
    return op->emitOpError("Stream-1: expected the number of an event as an "
                           "i32, got: ")
           << attribute.getValue();
  return success();
}

LogicalResult FSDPDialect::verifyRegionArgAttribute(Operation *op, unsigned,
                                                    unsigned argument,
                                                    NamedAttribute attribute) {
  StringRef name = attribute.getName();
  Attribute value = attribute.getValue();
  auto fail = [&](StringRef label, StringRef expected) {
    return op->emitOpError(label)
           << ": expected " << expected << " as " << name << " of argument "
           << argument << ", got: " << value;
  };
  if (name == inputNameAttrName && !isa<StringAttr>(value))
    return fail("Input-1", "a string");
  if ((name == inputLowAttrName || name == inputHighAttrName) &&
      !isa<IntegerAttr>(value))
    return fail("Input-1", "an integer");
  if (name == inputStridesAttrName) {
    auto strides = dyn_cast<DenseI64ArrayAttr>(value);
    auto function = dyn_cast<FunctionOpInterface>(op);
    auto type =
        function && argument < function.getNumArguments()
            ? dyn_cast<RankedTensorType>(function.getArgumentTypes()[argument])
            : RankedTensorType();
    if (!strides || !type || strides.size() != type.getRank())
      return fail("Input-1", "a number for each dimension");
  }
  if (name == offsetAttrName) {
    auto offset = dyn_cast<IntegerAttr>(value);
    if (!offset || offset.getInt() < 0)
      return fail("Offset-1", "a byte offset");
  }
  return success();
}
