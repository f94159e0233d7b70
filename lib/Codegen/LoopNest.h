//===- LoopNest.h - the loop of a kernel ----------------------------------===//
#ifndef FSDP_LIB_CODEGEN_LOOPNEST_H
#define FSDP_LIB_CODEGEN_LOOPNEST_H

#include "fsdp/Codegen/Elements.h"
#include "fsdp/Codegen/Kernels.h"

namespace mlir::fsdp {

/// Dimensions along which all tensors go on in one stride are one. For what is
/// left, the extents, and for each operand and then each result its strides.
struct LoopNest {
  SmallVector<int64_t> shape;
  SmallVector<SmallVector<int64_t>> strides;

  explicit LoopNest(KernelOp kernel);

  int64_t getRowLength() const { return shape.back(); }
  int64_t getNumRows() const;
  bool isOneRow() const { return shape.size() == 1; }

private:
  void collapse(ArrayRef<int64_t> domain, ArrayRef<size_t> walk,
                ArrayRef<SmallVector<int64_t>> all);
};

/// What the loop of each kind of processor is built from.
class LoopBuilder {
protected:
  explicit LoopBuilder(KernelOp kernel)
      : kernel(kernel), nest(kernel), b(kernel.getLoc(), kernel.getContext()) {}

  Value index(int64_t value);
  /// The element type of operand or result `index`.
  Type getElement(size_t index);
  size_t getNumOperands() { return kernel.getBody().front().getNumArguments(); }
  Value address(size_t tensor, Value base, Value offset);
  /// How far into each tensor a row begins, in elements.
  SmallVector<Value> getRowOffsets(Value row);
  /// The results' elements from those of the operands.
  SmallVector<Value> buildCalls(ElementBuilder &to, ArrayRef<Value> operands);

  KernelOp kernel;
  LoopNest nest;
  ImplicitLocOpBuilder b;
};

LoweredKernel lowerForCpu(KernelOp kernel, int64_t width);
LoweredKernel lowerForGpu(KernelOp kernel);

} // namespace mlir::fsdp

#endif // FSDP_LIB_CODEGEN_LOOPNEST_H
