//===- KernelTable.h - the kernels of a plan, ready to run ----------------===//
#ifndef FSDP_RUNTIME_OPERATORS_KERNELTABLE_H
#define FSDP_RUNTIME_OPERATORS_KERNELTABLE_H

#include "fsdp/Plan/KernelAbi.h"
#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Devices/Device.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::runtime {

class CallTable;

/// Machine code of a plan's kernels, in memory that may be executed and not
/// written. Immutable once it exists.
class KernelImages {
public:
  /// Maps the code for `target`; kernels without it have no function. Throws
  /// RunError where there is no memory for it.
  KernelImages(const std::vector<plan::Kernel> &kernels,
               const std::string &target);
  KernelImages(const KernelImages &) = delete;
  KernelImages &operator=(const KernelImages &) = delete;
  ~KernelImages();

  struct Function {
    plan::KernelFunction run = nullptr;
    std::vector<void *> imports;
  };
  /// Null if kernel `index` has no code, or if this LibTorch lacks a function
  /// that it calls.
  const Function &find(size_t index) const { return functions[index]; }

private:
  void *memory = nullptr;
  size_t bytes = 0;
  std::vector<Function> functions;
};

/// The best target of KernelCode that this processor has and that ATen uses
/// (ATEN_CPU_CAPABILITY); empty if there is none.
std::string kernelTarget();

/// Whether this process runs the code of plans; otherwise their kernels' calls
/// run one by one. True unless a program says otherwise, before it runs a plan.
void setRunsKernelCode(bool value);
bool runsKernelCode();

/// Why the code of a plan's kernels cannot run where KernelCode::target is
/// `target`, in words; empty if it can, or if there is none. Code is for the
/// version of PyTorch that the plan was captured for; for a GPU the plan may
/// leave its patch release open.
std::string whyNoKernelCode(const plan::Plan &plan, const std::string &target);

class KernelTable {
public:
  /// Borrows the plan and the device. Throws InputError that names a kernel
  /// with a call whose operator is unknown or whose arguments do not fit its
  /// schema, and RunError if a GPU does not take its code.
  KernelTable(const plan::Plan &plan, Device &device);
  ~KernelTable();

  /// Runs a kernel of the plan on values of the plan: its code if there is any
  /// for this processor and the operands are laid out as it expects; its calls
  /// otherwise, with equal bits. What an operator throws passes through.
  void run(const plan::Fused &fused, std::vector<at::Tensor> &values);

  /// Kernels with a function.
  int64_t compiled() const;

private:
  struct Entry;

  bool runCode(const Entry &entry, const plan::Fused &fused,
               std::vector<at::Tensor> &values) const;

  /// The operands and new results, as the code takes them; empty if one is laid
  /// out in another way, on another device, or where code for a GPU cannot take
  /// it.
  std::vector<void *> takeTensors(const Entry &entry, const plan::Fused &fused,
                                  std::vector<at::Tensor> &values) const;

  const plan::Plan &plan;
  Device &device;
  std::unique_ptr<KernelImages> images;
  std::vector<std::unique_ptr<Entry>> entries;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_OPERATORS_KERNELTABLE_H
