//===- Layout.cpp - tensors laid out as a plan says -----------------------===//
#include "fsdp/Runtime/Memory/Layout.h"
#include "fsdp/Runtime/Error.h"

#include <ATen/ops/empty_strided.h>

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

plan::DType planType(at::ScalarType type) {
  for (int dtype = 0; dtype <= int(plan::DType::Complex128); ++dtype)
    if (scalarType(plan::DType(dtype)) == type)
      return plan::DType(dtype);
  throw InputError(std::string("plans cannot have tensors of ") +
                   c10::toString(type));
}

at::Tensor emptyLaidOut(const plan::TensorSpec &spec,
                        const plan::Strides &strides, c10::Device device) {
  return at::empty_strided(spec.shape, plan::fullStrides(spec.shape, strides),
                           at::dtype(scalarType(spec.dtype)).device(device));
}

bool isLaidOut(const at::Tensor &tensor, const plan::Strides &strides) {
  if (tensor.numel() == 0)
    return true;
  plan::Strides want = plan::fullStrides(tensor.sizes().vec(), strides);
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    if (tensor.size(dim) > 1 && tensor.stride(dim) != want[size_t(dim)])
      return false;
  return true;
}

at::Tensor laidOut(const at::Tensor &tensor, const plan::Strides &strides,
                   c10::Device device) {
  if (isLaidOut(tensor, strides))
    return tensor.to(device);
  at::Tensor copy = at::empty_strided(
      tensor.sizes(), plan::fullStrides(tensor.sizes().vec(), strides),
      tensor.options().device(device));
  return copy.copy_(tensor);
}

void copyLaidOut(const at::Tensor &to, const at::Tensor &from,
                 const std::string &what) {
  if (to.numel() == 0)
    return;
  at::Tensor once = to, first = from;
  for (int64_t dim = 0; dim < to.dim(); ++dim)
    if (to.size(dim) > 1 && to.stride(dim) == 0) {
      once = once.narrow(dim, 0, 1);
      first = first.narrow(dim, 0, 1);
    }
  once.copy_(first);
  if (once.numel() != to.numel() &&
      !from.to(to.scalar_type()).equal(to.to(from.device())))
    throw InputError(what + ": expected the same elements along dimensions of "
                            "stride 0, got others");
}

} // namespace fsdp::runtime
