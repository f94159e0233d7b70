//===- CallTable.h - the operator calls of a program, looked up once ------===//
#ifndef FSDP_RUNTIME_OPERATORS_CALLTABLE_H
#define FSDP_RUNTIME_OPERATORS_CALLTABLE_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Operators/StrideCheck.h"
#include "fsdp/Runtime/Position.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <memory>
#include <string>
#include <vector>

namespace fsdp::runtime {

class AttentionKernels;

/// The calls and constants of a list of instructions: operators as handles,
/// arguments as IValues of the schemas' types, constants as tensors.
class CallTable {
public:
  /// Borrows the instructions, which are some of the plan's. Constants lie on
  /// `device`, where its operators are to run; other than on the CPU, attention
  /// runs the device's own kernels (AttentionKernels.h). Throws InputError
  /// that names an instruction whose operator is unknown or whose arguments do
  /// not fit its schema.
  CallTable(const plan::Plan &plan,
            const std::vector<plan::Instruction> &instructions,
            c10::Device device = c10::kCPU);
  ~CallTable();

  /// Runs instruction `index`, which is `call` of the list. `values` is indexed
  /// by value id. What the operator throws passes through; the first run of a
  /// call checks strides besides (StrideCheck.h). A call of an operator that is
  /// not ATen's is followed (KernelCheck.h).
  void run(size_t index, const plan::Call &call,
           std::vector<at::Tensor> &values);
  /// Defined for an instruction that is a constant.
  const at::Tensor &constant(size_t index) const { return constants[index]; }

private:
  struct ResolvedCall;

  void resolve(const plan::Call &call, size_t index);
  /// Runs the operator on `stack`.
  void invoke(size_t index);

  /// Throws RunError where results have other shapes than the plan says.
  void checkShapes(const plan::Call &call,
                   const std::vector<at::Tensor> &values) const;

  const plan::Plan &plan;
  /// Of the plan.
  const std::vector<plan::Instruction> &instructions;
  /// They are the training step.
  bool trains;
  c10::Device device;
  StrideCheck strides;
  /// Per instruction: it ran before.
  std::vector<bool> ran;
  /// Null on the CPU.
  std::unique_ptr<AttentionKernels> attention;
  /// Per instruction; empty for those that are not calls.
  std::vector<std::unique_ptr<ResolvedCall>> calls;
  std::vector<at::Tensor> constants;
  std::vector<c10::IValue> stack;
};

/// "aten::mm in module \"layers.3.mlp\" (unit \"layers.3\") at llama.py:40":
/// names an instruction and says where it comes from.
std::string describeInstruction(const plan::Plan &plan,
                                const plan::Instruction &instruction);

/// " at step 3, instruction 84: …": where a rank is in its run, to be appended
/// to what happened to it there.
std::string describePosition(const plan::Plan &plan, const Position &position);

/// The first line of a LibTorch message.
std::string firstLine(const std::string &text);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_OPERATORS_CALLTABLE_H
