//===- Layout.h - tensors laid out as a plan says ---------------*- C++ -*-===//
#ifndef FSDP_RUNTIME_MEMORY_LAYOUT_H
#define FSDP_RUNTIME_MEMORY_LAYOUT_H

#include "fsdp/Plan/Plan.h"

#include <ATen/core/Tensor.h>

#include <string>

namespace fsdp::runtime {

/// The torch dtype for a plan's dtype.
at::ScalarType scalarType(plan::DType dtype);
/// The inverse. Throws InputError if plans have no such dtype.
plan::DType planType(at::ScalarType type);

/// Memory of its own for a tensor of this shape, dtype and strides.
at::Tensor emptyLaidOut(const plan::TensorSpec &spec,
                        const plan::Strides &strides, c10::Device device);

/// Whether the tensor has the strides; those of dimensions of one element, and
/// of tensors without elements, do not count.
bool isLaidOut(const at::Tensor &tensor, const plan::Strides &strides);

/// The tensor on the device with the strides: the tensor itself if it already
/// is that, otherwise a copy.
at::Tensor laidOut(const at::Tensor &tensor, const plan::Strides &strides,
                   c10::Device device);

/// Copies to a tensor that may have dimensions of stride 0: along these the
/// elements of `from` must be equal. Throws InputError with `what` if they are
/// not.
void copyLaidOut(const at::Tensor &to, const at::Tensor &from,
                 const std::string &what);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_MEMORY_LAYOUT_H
