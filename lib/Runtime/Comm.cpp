//===- Comm.cpp - what all implementations share --------------------------===//
#include "fsdp/Runtime/Comm.h"
#include "fsdp/Runtime/Error.h"

namespace fsdp::runtime {

at::ScalarType scalarType(plan::DType dtype) {
  switch (dtype) {
  case plan::DType::Float32:
    return at::kFloat;
  case plan::DType::Float64:
    return at::kDouble;
  case plan::DType::Float16:
    return at::kHalf;
  case plan::DType::BFloat16:
    return at::kBFloat16;
  case plan::DType::Int64:
    return at::kLong;
  case plan::DType::Int32:
    return at::kInt;
  case plan::DType::Int16:
    return at::kShort;
  case plan::DType::Int8:
    return at::kChar;
  case plan::DType::UInt8:
    return at::kByte;
  case plan::DType::Bool:
    return at::kBool;
  case plan::DType::UInt16:
    return at::kUInt16;
  case plan::DType::UInt32:
    return at::kUInt32;
  case plan::DType::UInt64:
    return at::kUInt64;
  case plan::DType::Float8E4M3FN:
    return at::kFloat8_e4m3fn;
  case plan::DType::Float8E5M2:
    return at::kFloat8_e5m2;
  case plan::DType::Complex32:
    return at::kComplexHalf;
  case plan::DType::Complex64:
    return at::kComplexFloat;
  case plan::DType::Complex128:
    return at::kComplexDouble;
  }
  throw InputError("unknown dtype");
}

} // namespace fsdp::runtime
