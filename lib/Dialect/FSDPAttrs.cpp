//===- FSDPAttrs.cpp - attributes and types of the fsdp dialect -----------===//
#include "fsdp/Dialect/FSDP.h"

#include "mlir/IR/Builders.h"
#include "mlir/IR/DialectImplementation.h"
#include "llvm/ADT/StringSet.h"
#include "llvm/ADT/TypeSwitch.h"

using namespace mlir;
using namespace mlir::fsdp;

//===----------------------------------------------------------------------===//
// `[{"shard"}, {}]`
//===----------------------------------------------------------------------===//

static ParseResult parseDimAxes(AsmParser &parser, ArrayAttr &dims) {
  MLIRContext *context = parser.getContext();
  SmallVector<Attribute> parsed;
  auto parseAxes = [&]() -> ParseResult {
    SmallVector<Attribute> axes;
    if (parser.parseCommaSeparatedList(AsmParser::Delimiter::Braces, [&] {
          std::string axis;
          if (parser.parseString(&axis))
            return failure();
          int64_t size;
          if (failed(parser.parseOptionalColon()))
            axes.push_back(StringAttr::get(context, axis));
          else if (parser.parseInteger(size))
            return failure();
          else
            axes.push_back(MeshAxisAttr::get(context, axis, size));
          return success();
        }))
      return failure();
    parsed.push_back(ArrayAttr::get(context, axes));
    return success();
  };
  if (parser.parseCommaSeparatedList(AsmParser::Delimiter::Square, parseAxes))
    return failure();
  dims = ArrayAttr::get(context, parsed);
  return success();
}

static void printDimAxes(AsmPrinter &printer, ArrayAttr dims) {
  printer << '[';
  llvm::interleaveComma(dims, printer, [&](Attribute axes) {
    printer << '{';
    llvm::interleaveComma(cast<ArrayAttr>(axes), printer, [&](Attribute axis) {
      printer << '"' << getAxisName(axis) << '"';
      if (auto part = dyn_cast<MeshAxisAttr>(axis))
        printer << ':' << part.getSize();
    });
    printer << '}';
  });
  printer << ']';
}

#include "fsdp/Dialect/FSDPDialect.cpp.inc"
#include "fsdp/Dialect/FSDPEnums.cpp.inc"

#define GET_ATTRDEF_CLASSES
#include "fsdp/Dialect/FSDPAttrs.cpp.inc"

#define GET_TYPEDEF_CLASSES
#include "fsdp/Dialect/FSDPTypes.cpp.inc"

void FSDPDialect::initialize() {
  addAttributes<
#define GET_ATTRDEF_LIST
#include "fsdp/Dialect/FSDPAttrs.cpp.inc"
      >();
  addTypes<
#define GET_TYPEDEF_LIST
#include "fsdp/Dialect/FSDPTypes.cpp.inc"
      >();
  addOperations<
#define GET_OP_LIST
#include "fsdp/Dialect/FSDPOps.cpp.inc"
      >();
}

//===----------------------------------------------------------------------===//
// MeshAttr
//===----------------------------------------------------------------------===//

LogicalResult MeshAttr::verify(function_ref<InFlightDiagnostic()> emitError,
                               ArrayRef<MeshAxisAttr> axes) {
  llvm::StringSet<> names;
  for (MeshAxisAttr axis : axes) {
    if (!names.insert(axis.getName()).second)
      return emitError() << "Mesh-1: expected unique axis names, got \""
                         << axis.getName() << "\" twice";
    if (axis.getSize() < 1)
      return emitError() << "Mesh-2: expected the size of axis \""
                         << axis.getName()
                         << "\" to be at least 1, got: " << axis.getSize();
  }
  return success();
}

int64_t MeshAttr::getNumRanks() const {
  int64_t ranks = 1;
  for (MeshAxisAttr axis : getAxes())
    ranks *= axis.getSize();
  return ranks;
}

std::optional<int64_t> MeshAttr::getAxisSize(StringRef name) const {
  for (MeshAxisAttr axis : getAxes())
    if (axis.getName() == name)
      return axis.getSize();
  return std::nullopt;
}

//===----------------------------------------------------------------------===//
// ShardingAttr, ShardedType
//===----------------------------------------------------------------------===//

LogicalResult ShardingAttr::verify(function_ref<InFlightDiagnostic()> emitError,
                                   FlatSymbolRefAttr mesh, ArrayAttr dims,
                                   ArrayAttr partial) {
  SmallVector<Attribute> axes;
  for (Attribute dim : dims)
    llvm::append_range(axes, cast<ArrayAttr>(dim));
  if (partial) {
    if (partial.empty() || !llvm::all_of(partial, llvm::IsaPred<StringAttr>))
      return emitError() << "Sharding-1: expected names of axes that the "
                            "tensor is partial along, got: "
                         << partial;
    llvm::append_range(axes, partial);
  }
  llvm::StringSet<> used;
  for (Attribute axis : axes)
    if (StringRef name = getAxisName(axis); !used.insert(name).second)
      return emitError() << "Sharding-1: expected each axis at most once, "
                            "got \""
                         << name << "\" twice";
  return success();
}

StringRef mlir::fsdp::getAxisName(Attribute axis) {
  if (auto part = dyn_cast<MeshAxisAttr>(axis))
    return part.getName();
  return cast<StringAttr>(axis);
}

ShardingAttr ShardingAttr::getSubAxis(int64_t size) const {
  SmallVector<Attribute> dims;
  for (Attribute axes : getDims()) {
    SmallVector<Attribute> parts;
    for (Attribute axis : cast<ArrayAttr>(axes))
      parts.push_back(MeshAxisAttr::get(getContext(), getAxisName(axis), size));
    dims.push_back(ArrayAttr::get(getContext(), parts));
  }
  return get(getContext(), getMesh(), ArrayAttr::get(getContext(), dims),
             getPartial());
}

bool ShardingAttr::isShardedOver(StringRef name) const {
  return llvm::any_of(getDims(), [&](Attribute axes) {
    return llvm::any_of(cast<ArrayAttr>(axes), [&](Attribute axis) {
      return getAxisName(axis) == name;
    });
  });
}

bool ShardingAttr::isPartialAlong(StringRef name) const {
  return getPartial() &&
         llvm::is_contained(getPartial().getAsValueRange<StringAttr>(), name);
}

ShardingAttr ShardingAttr::clonePartial(ArrayRef<Attribute> axes) const {
  return get(getContext(), getMesh(), getDims(),
             axes.empty() ? ArrayAttr() : ArrayAttr::get(getContext(), axes));
}

int64_t ShardingAttr::getShardedDim() const {
  for (auto [index, axes] : llvm::enumerate(getDims()))
    if (!cast<ArrayAttr>(axes).empty())
      return static_cast<int64_t>(index);
  return -1;
}

LogicalResult ShardedType::verify(function_ref<InFlightDiagnostic()> emitError,
                                  RankedTensorType tensor,
                                  ShardingAttr sharding) {
  if (static_cast<int64_t>(sharding.getDims().size()) != tensor.getRank())
    return emitError() << "Sharded-1: expected a sharding of "
                       << tensor.getRank()
                       << " dimensions, got: " << sharding.getDims().size();
  return success();
}

//===----------------------------------------------------------------------===//
// MixedPrecisionAttr
//===----------------------------------------------------------------------===//

LogicalResult
MixedPrecisionAttr::verify(function_ref<InFlightDiagnostic()> emitError,
                           Type paramDtype, Type reduceDtype, Type outputDtype,
                           bool castForwardInputs) {
  for (Type dtype : {paramDtype, reduceDtype, outputDtype})
    if (dtype &&
        !isa<Float32Type, Float64Type, Float16Type, BFloat16Type>(dtype))
      return emitError()
             << "MixedPrecision-1: expected f32, f64, f16 or bf16, got: "
             << dtype;
  return success();
}

Type MixedPrecisionAttr::getComputeDtype(Type element) const {
  return getParamDtype() && isa<FloatType>(element) ? getParamDtype() : element;
}

//===----------------------------------------------------------------------===//
// GradientDivisionAttr
//===----------------------------------------------------------------------===//

LogicalResult
GradientDivisionAttr::verify(function_ref<InFlightDiagnostic()> emitError,
                             FloatAttr factor, bool forceSum) {
  if (!factor && forceSum)
    return success();
  double value = factor ? factor.getValueAsDouble() : 0;
  if (factor && std::isfinite(value) && value > 0)
    return success();
  InFlightDiagnostic diag =
      emitError() << "GradientDivision-1: expected a positive factor, got: ";
  if (factor)
    return diag << value;
  return diag << "none";
}
