//===- Layout.cpp - tensors laid out as a plan says -----------------------===//
#include "fsdp/Runtime/Layout.h"
#include "fsdp/Runtime/Comm.h"
#include "fsdp/Runtime/Error.h"

#include <ATen/ops/empty_strided.h>

namespace fsdp::runtime {

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
