//===- KernelCheck.h - whether a kernel does what its schema says ---------===//
//
// A plan relies on what an operator's schema says about memory, and on what its
// fake kernel said about results when the model was captured. For ATen's
// operators, LibTorch's tests prove that. For operators of other libraries, it
// is checked while they run.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_OPERATORS_KERNELCHECK_H
#define FSDP_RUNTIME_OPERATORS_KERNELCHECK_H

#include "fsdp/Plan/Plan.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>
#include <vector>

namespace fsdp::runtime {

/// Follows one call of an operator that is not ATen's, run after run. On the
/// CPU the first run is looked at closely: it hashes operands.
class KernelCheck {
public:
  /// Borrows plan and call, whose arguments fit the operator.
  KernelCheck(const plan::Plan &plan, const plan::Call &call,
              const c10::OperatorHandle &handle);

  /// Before a run, with the call's operands in `values`.
  void before(const std::vector<at::Tensor> &values);

  /// After it, with its results there too. Throws RunError, in terms of the
  /// schema, if a result does not have the shape, dtype and strides of the
  /// plan, or shares memory with something that the plan keeps apart from it.
  /// After the first run it also throws if, against the schema, an operand was
  /// written or laid out differently, or the rank's generator was drawn from.
  void after(const std::vector<at::Tensor> &values);

private:
  struct Operand {
    std::string name; ///< of the argument
    plan::ValueId value;
    bool written;
    // Before the first run:
    std::string layout = {};
    std::string hash = {};
  };
  struct Generator {
    at::mt19937_data_pod engine;
    std::optional<float> nextFloat;
    std::optional<double> nextDouble;
    static Generator now();
    bool operator==(const Generator &other) const;
  };

  void addOperands(const plan::Arg &arg, const c10::Argument &formal);
  void checkType(size_t result, const at::Tensor &got) const;
  void checkMemory(const std::vector<at::Tensor> &values) const;
  void checkFirstRun(const std::vector<at::Tensor> &values) const;
  plan::ValueId storageOf(plan::ValueId value) const;

  const plan::Plan &plan;
  const plan::Call &call;
  bool isRandom;
  std::vector<Operand> operands;
  std::optional<Generator> generator;
  int runs = 0;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_OPERATORS_KERNELCHECK_H
