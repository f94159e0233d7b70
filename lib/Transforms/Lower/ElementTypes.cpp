//===- ElementTypes.cpp - MLIR's element types as the plan's --------------===//
#include "ElementTypes.h"

#include "mlir/IR/Builders.h"
#include "mlir/IR/BuiltinTypes.h"

using namespace mlir;
namespace plan = ::fsdp::plan;

std::optional<plan::DType> mlir::fsdp::getDType(Type type) {
  if (type.isF32())
    return plan::DType::Float32;
  if (type.isF64())
    return plan::DType::Float64;
  if (type.isF16())
    return plan::DType::Float16;
  if (type.isBF16())
    return plan::DType::BFloat16;
  if (isa<Float8E4M3FNType>(type))
    return plan::DType::Float8E4M3FN;
  if (isa<Float8E5M2Type>(type))
    return plan::DType::Float8E5M2;
  if (auto complex = dyn_cast<ComplexType>(type)) {
    if (complex.getElementType().isF16())
      return plan::DType::Complex32;
    if (complex.getElementType().isF32())
      return plan::DType::Complex64;
    if (complex.getElementType().isF64())
      return plan::DType::Complex128;
    return std::nullopt;
  }
  auto integer = dyn_cast<IntegerType>(type);
  if (!integer || integer.isSigned())
    return std::nullopt;
  if (integer.isUnsigned())
    switch (integer.getWidth()) {
    case 64:
      return plan::DType::UInt64;
    case 32:
      return plan::DType::UInt32;
    case 16:
      return plan::DType::UInt16;
    case 8:
      return plan::DType::UInt8;
    default:
      return std::nullopt;
    }
  switch (integer.getWidth()) {
  case 64:
    return plan::DType::Int64;
  case 32:
    return plan::DType::Int32;
  case 16:
    return plan::DType::Int16;
  case 8:
    return plan::DType::Int8;
  case 1:
    return plan::DType::Bool;
  default:
    return std::nullopt;
  }
}

Type mlir::fsdp::getElementType(MLIRContext *context, plan::DType dtype) {
  Builder builder(context);
  auto complex = [](Type part) -> Type { return ComplexType::get(part); };
  for (Type type :
       {Type(builder.getF32Type()), Type(builder.getF64Type()),
        Type(builder.getF16Type()), Type(builder.getBF16Type()),
        complex(builder.getF16Type()), complex(builder.getF32Type()),
        complex(builder.getF64Type()),
        Type(builder.getIntegerType(8, /*isSigned=*/false))})
    if (getDType(type) == dtype)
      return type;
  llvm_unreachable("a buffer of another dtype");
}
