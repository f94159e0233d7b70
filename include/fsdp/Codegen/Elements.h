//===- Elements.h - what element-wise calls compute -----------------------===//
//
// One table says which calls can be in a kernel, and how each element of their
// result is rounded: as ATen's kernels for the CPU, or for a GPU, do in the
// version of PyTorch that this is tested with, with the multiply-adds that
// their compiler contracts written out. The runtime runs the code with the
// version alone that the plan was captured for.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_CODEGEN_ELEMENTS_H
#define FSDP_CODEGEN_ELEMENTS_H

#include "fsdp/Dialect/Aten.h"
#include "mlir/IR/ImplicitLocOpBuilder.h"

namespace mlir::fsdp {

/// Builds operations on `width` elements at once; on numbers if it is 1.
///
/// Elements are f32, f64 or i1. Those of bf16 are f32 that have been rounded to
/// bf16.
class ElementBuilder {
public:
  /// Calls the function of that name on elements of type f32.
  using CallImport = llvm::function_ref<Value(StringRef name, Value elements)>;

  ElementBuilder(ImplicitLocOpBuilder &b, int64_t width,
                 CallImport callImport = nullptr, bool isForGpu = false)
      : b(b), width(width), isForGpu(isForGpu), callImport(callImport) {}

  /// `element`, or a vector of it.
  Type getType(Type element) const;
  /// The type in which elements of a tensor are held.
  static Type getHeldType(Type element);

  Value constant(Type element, double value);
  Value splat(Value number);
  Value roundToBF16(Value f32);
  /// The function "exp" or "tanh" that ATen calls: Sleef's with an error of up
  /// to 1 ulp, for which `width` is 8 or 16; on a GPU libdevice's.
  Value callFunction(StringRef function, Value f32);

  /// What an element of a tensor is in memory.
  static Type getStoredType(Type element);
  /// An element as it is held, from what is in memory, and back.
  Value fromMemory(Type element, Value stored);
  Value toMemory(Type element, Value held);

  ImplicitLocOpBuilder &b;
  const int64_t width;
  const bool isForGpu;

private:
  CallImport callImport;
};

/// What `call` computes from elements of its tensor operands and numbers, in
/// the order of its arguments.
using ElementFunction = Value (*)(ElementBuilder &to, aten::CallOp call,
                                  ValueRange elements);

/// Whether the module of this op was captured for a GPU, whose kernels round in
/// other ways.
bool isForGpu(Operation *op);

/// Null if the call cannot be in a kernel of what its module was captured for.
ElementFunction findElementFunction(aten::CallOp call);

/// As many elements as ATen's loop takes at once with the widest vectors, two
/// of bf16: of a multiple, none are left.
inline constexpr int64_t kElementsOfFullVectors = 64;

/// Whether ATen computes the elements that fill its vectors in another way than
/// those that are left. Such a call can be in a kernel if none are left, and if
/// its operands and its result are laid out alike. On a GPU there are none.
bool needsFullVectors(aten::CallOp call);

/// The element of the call's result, rounded to its dtype. `elements` are those
/// of its operands.
Value buildElement(ElementBuilder &to, aten::CallOp call, ValueRange elements);

} // namespace mlir::fsdp

#endif // FSDP_CODEGEN_ELEMENTS_H
