//===- Kernels.h - from fsdp.kernel to machine code -----------------------===//
#ifndef FSDP_CODEGEN_KERNELS_H
#define FSDP_CODEGEN_KERNELS_H

#include "fsdp/Dialect/FSDP.h"

#include <string>

namespace mlir::fsdp {

/// A kind of processor that kernels are compiled for.
struct KernelTarget {
  /// LLVM's name of the processor, which is KernelCode::target too.
  StringRef name;
  /// Elements that are computed at once; 0 on a GPU, where it depends on the
  /// kernel.
  int64_t width;

  bool isGpu() const { return width == 0; }
};
/// The GPU that the module was captured for, else the CPUs.
SmallVector<KernelTarget> getKernelTargets(ModuleOp module);

/// How far apart neighbours of an operand are along each dimension of the
/// kernel's results, 0 where it is broadcast; `strides` are the operand's own,
/// empty if it is row-major. Empty if the operand does not broadcast to
/// `shape`.
SmallVector<int64_t> getStridesOver(ArrayRef<int64_t> shape,
                                    RankedTensorType operand,
                                    ArrayRef<int64_t> strides);
/// The dimensions of results of these shape and strides in the order in which a
/// kernel walks over them: the last are neighbours in memory. Those of one
/// element are left out.
SmallVector<size_t> getWalk(ArrayRef<int64_t> shape, ArrayRef<int64_t> strides);
/// Whether a kernel with this walk can read an operand with these strides over
/// the results' shape: neighbours along the last dimension are neighbours in
/// memory, or are one.
bool areReadable(ArrayRef<size_t> walk, ArrayRef<int64_t> strides);

/// The dialects that kernels are lowered to, for getDependentDialects.
void registerKernelDialects(DialectRegistry &registry);

struct LoweredKernel {
  /// One function as KernelAbi.h says, in the dialects func, scf, arith, math,
  /// vector and llvm.
  OwningOpRef<ModuleOp> module;
  int64_t trips;
  /// KernelCode::imports.
  SmallVector<std::string> imports;
};

/// Whether lowerKernel can lower it: its calls have element functions and
/// results of the kernel's shape, its operands are readable, and a kernel that
/// is `whole`, as one with a call that needs full vectors must be, is one row
/// that fills them.
bool canLower(KernelOp kernel);

/// The kernel can be lowered.
LoweredKernel lowerKernel(KernelOp kernel, const KernelTarget &target);

struct MachineCode {
  std::string image;
  int64_t entry;
};

/// Lowers and compiles what lowerKernel made. An error names the kernel.
FailureOr<MachineCode> compileKernel(LoweredKernel kernel,
                                     const KernelTarget &target);

} // namespace mlir::fsdp

#endif // FSDP_CODEGEN_KERNELS_H
