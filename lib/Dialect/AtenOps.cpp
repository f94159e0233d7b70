//===- AtenOps.cpp - the aten dialect -------------------------------------===//
#include "fsdp/Dialect/Aten.h"

#include "mlir/IR/Builders.h"
#include "mlir/IR/DialectImplementation.h"
#include "mlir/IR/OpImplementation.h"
#include "llvm/ADT/TypeSwitch.h"

using namespace mlir;
using namespace mlir::aten;

#include "fsdp/Dialect/AtenDialect.cpp.inc"

#define GET_ATTRDEF_CLASSES
#include "fsdp/Dialect/AtenAttrs.cpp.inc"

void AtenDialect::initialize() {
  addAttributes<
#define GET_ATTRDEF_LIST
#include "fsdp/Dialect/AtenAttrs.cpp.inc"
      >();
  addOperations<
#define GET_OP_LIST
#include "fsdp/Dialect/AtenOps.cpp.inc"
      >();
}

//===----------------------------------------------------------------------===//
// Arguments: `%a, [%b, none], 1, 2.5, true, "text", device`
//===----------------------------------------------------------------------===//

static ParseResult
parseArg(OpAsmParser &parser,
         SmallVectorImpl<OpAsmParser::UnresolvedOperand> &operands,
         Attribute &arg) {
  MLIRContext *context = parser.getContext();
  OpAsmParser::UnresolvedOperand operand;
  OptionalParseResult isOperand = parser.parseOptionalOperand(operand);
  if (isOperand.has_value()) {
    if (failed(*isOperand))
      return failure();
    operands.push_back(operand);
    arg = UnitAttr::get(context);
    return success();
  }
  if (succeeded(parser.parseOptionalKeyword("none"))) {
    arg = NoneAttr::get(context);
    return success();
  }
  if (succeeded(parser.parseOptionalKeyword("device"))) {
    arg = DeviceAttr::get(context);
    return success();
  }
  if (succeeded(parser.parseOptionalLSquare())) {
    SmallVector<Attribute> elements;
    if (failed(parser.parseOptionalRSquare())) {
      do {
        if (parseArg(parser, operands, elements.emplace_back()))
          return failure();
      } while (succeeded(parser.parseOptionalComma()));
      if (parser.parseRSquare())
        return failure();
    }
    arg = ArrayAttr::get(context, elements);
    return success();
  }
  return parser.parseAttribute(arg);
}

static ParseResult
parseCallArgs(OpAsmParser &parser,
              SmallVectorImpl<OpAsmParser::UnresolvedOperand> &operands,
              ArrayAttr &args) {
  SmallVector<Attribute> parsed;
  // An operator without arguments.
  if (succeeded(parser.parseOptionalKeyword("void"))) {
    args = ArrayAttr::get(parser.getContext(), parsed);
    return success();
  }
  do {
    if (parseArg(parser, operands, parsed.emplace_back()))
      return failure();
  } while (succeeded(parser.parseOptionalComma()));
  args = ArrayAttr::get(parser.getContext(), parsed);
  return success();
}

static void printArg(OpAsmPrinter &printer, Attribute arg,
                     OperandRange operands, unsigned &next) {
  if (isa<UnitAttr>(arg)) {
    // Call-1 is not verified yet when an invalid op is printed.
    if (next < operands.size())
      printer.printOperand(operands[next++]);
    else
      printer << "<missing operand>";
  } else if (isa<NoneAttr>(arg)) {
    printer << "none";
  } else if (isa<DeviceAttr>(arg)) {
    printer << "device";
  } else if (auto list = dyn_cast<ArrayAttr>(arg)) {
    printer << '[';
    llvm::interleaveComma(list, printer, [&](Attribute element) {
      printArg(printer, element, operands, next);
    });
    printer << ']';
  } else if (auto real = dyn_cast<FloatAttr>(arg);
             real && !real.getValue().isFinite()) {
    printer.printAttribute(arg); // hexadecimal digits need the type
  } else {
    printer.printAttributeWithoutType(arg);
  }
}

static void printCallArgs(OpAsmPrinter &printer, CallOp op,
                          OperandRange operands, ArrayAttr args) {
  if (args.empty()) {
    printer << "void";
    return;
  }
  unsigned next = 0;
  llvm::interleaveComma(args, printer, [&](Attribute arg) {
    printArg(printer, arg, operands, next);
  });
}

//===----------------------------------------------------------------------===//
// CallOp
//===----------------------------------------------------------------------===//

static unsigned countPlaceholders(ArrayAttr args) {
  unsigned count = 0;
  for (Attribute arg : args) {
    if (isa<UnitAttr>(arg))
      ++count;
    else if (auto list = dyn_cast<ArrayAttr>(arg))
      count += countPlaceholders(list);
  }
  return count;
}

static LogicalResult verifyStrides(CallOp call) {
  std::optional<ArrayAttr> strides = call.getStrides();
  if (!strides)
    return success();
  if (strides->size() != call.getNumResults())
    return call.emitOpError("Call-4: expected strides of ")
           << call.getNumResults() << " results, got: " << strides->size();
  for (auto [entry, result] : llvm::zip(*strides, call.getResults())) {
    auto list = dyn_cast<DenseI64ArrayAttr>(entry);
    auto type = cast<RankedTensorType>(result.getType());
    if (!list ||
        (!list.empty() &&
         static_cast<int64_t>(list.size()) != type.getRank()) ||
        llvm::any_of(list.asArrayRef(), [](int64_t s) { return s < 0; }))
      return call.emitOpError("Call-4: expected a non-negative stride for each "
                              "dimension of ")
             << type << ", or none, got: " << entry;
  }
  return success();
}

void CallOp::build(OpBuilder &builder, OperationState &state, TypeRange results,
                   StringRef callee, ArrayRef<OpFoldResult> arguments) {
  SmallVector<Value> operands;
  SmallVector<Attribute> args;
  for (OpFoldResult argument : arguments) {
    if (auto value = dyn_cast<Value>(argument)) {
      operands.push_back(value);
      args.push_back(builder.getUnitAttr());
    } else {
      args.push_back(cast<Attribute>(argument));
    }
  }
  build(builder, state, results, callee, operands, builder.getArrayAttr(args),
        /*views=*/nullptr, /*mutates=*/nullptr, /*random=*/false,
        /*reduce_input_of=*/nullptr, /*recompute=*/false, /*strides=*/nullptr,
        /*schema=*/nullptr);
}

LogicalResult CallOp::verify() {
  unsigned placeholders = countPlaceholders(getArgs());
  if (placeholders != getNumOperands())
    return emitOpError("Call-1: expected ")
           << getNumOperands() << " operands in args, got: " << placeholders;
  auto operandExists = [&](int64_t index) {
    return index >= 0 && index < static_cast<int64_t>(getNumOperands());
  };
  if (auto views = getViews()) {
    if (views->size() != getNumResults())
      return emitOpError("Call-2: expected views of ")
             << getNumResults() << " results, got: " << views->size();
    for (int64_t index : *views)
      if (index != -1 && !operandExists(index))
        return emitOpError("Call-2: views name operand ")
               << index << ", expected less than " << getNumOperands();
  }
  if (auto mutates = getMutates())
    for (int64_t index : *mutates)
      if (!operandExists(index))
        return emitOpError("Call-2: mutates names operand ")
               << index << ", expected less than " << getNumOperands();
  auto [nameSpace, name] = getCallee().split("::");
  if (nameSpace.empty() || name.empty())
    return emitOpError("Call-3: expected a callee of the form "
                       "\"namespace::name\", got: \"")
           << getCallee() << '"';
  if (auto schema = getSchema())
    if (!schema->starts_with((getCallee() + "(").str()))
      return emitOpError("Call-5: expected the schema of \"")
             << getCallee() << "\", got: \"" << *schema << '"';
  return verifyStrides(*this);
}

void CallOp::getEffects(
    SmallVectorImpl<SideEffects::EffectInstance<MemoryEffects::Effect>>
        &effects) {
  // Operands may alias storage that another call writes in place, so even a
  // functional operator reads memory and cannot move over a write.
  effects.emplace_back(MemoryEffects::Read::get());
  // One without results is there for what it checks.
  if (getMutates() || getRandom() || getNumResults() == 0) {
    effects.emplace_back(MemoryEffects::Write::get());
    return;
  }
  // New storage that a later call may mutate: two such calls are not one value.
  for (auto [index, result] : llvm::enumerate(getOperation()->getOpResults()))
    if (!getViewedOperand(index))
      effects.emplace_back(MemoryEffects::Allocate::get(), result);
}

Value CallOp::getViewedOperand(unsigned index) {
  if (auto views = getViews())
    if (int64_t operand = (*views)[index]; operand >= 0)
      return getOperand(operand);
  return {};
}

#define GET_OP_CLASSES
#include "fsdp/Dialect/AtenOps.cpp.inc"
