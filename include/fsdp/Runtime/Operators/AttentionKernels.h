//===- AttentionKernels.h - a GPU's attention in place of the CPU's -------===//
//
// A plan is captured on the CPU, where scaled_dot_product_attention is the
// CPU's flash kernel and its backward. On another device that pair becomes the
// kernel that PyTorch would take there (flash, memory-efficient, cuDNN) and its
// backward. What such a kernel hands to its backward besides the plan's values
// (a padded logsumexp, lengths, the state of a generator) is kept in between.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_OPERATORS_ATTENTIONKERNELS_H
#define FSDP_RUNTIME_OPERATORS_ATTENTIONKERNELS_H

#include "fsdp/Plan/Plan.h"

#include <ATen/SDPBackend.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

namespace fsdp::runtime {

class AttentionKernels {
public:
  /// The tensors of a forward call, its mask (undefined: none), whether it is
  /// causal and its scale. `query`, `key` and `value` require gradients where
  /// backward follows.
  struct Problem {
    at::Tensor query, key, value, mask;
    bool isCausal;
    std::optional<double> scale;
  };
  using Choose = std::function<at::SDPBackend(const Problem &)>;

  /// PyTorch's choice on the tensors' device.
  static at::SDPBackend fusedChoice(const Problem &problem);

  /// Throws RunError, which names an operator that this LibTorch lacks, or an
  /// argument of one that is not known here.
  explicit AttentionKernels(const plan::Plan &plan,
                            Choose choose = &fusedChoice);
  ~AttentionKernels();

  /// Takes note of instruction `index`, in the order of the program. Throws
  /// InputError for attention with dropout, and for a backward without its
  /// forward.
  void add(const plan::Instruction &instruction, size_t index);
  /// Whether an added instruction runs here and not as its own operator.
  bool runs(size_t index) const { return sites.count(index) > 0; }
  /// Takes the arguments of the instruction's operator from the stack and
  /// leaves its results, laid out in memory as the CPU's. Throws RunError if
  /// the device has no kernel for them; the choice is made once per
  /// instruction.
  void run(size_t index, torch::jit::Stack &stack);

private:
  struct Kernel;
  struct Forward;
  struct Site {
    /// The forward of the call itself, or of the call whose backward it is.
    std::shared_ptr<Forward> forward;
    bool isBackward = false;
  };

  void choose(Forward &forward, const Problem &problem);
  void runForward(Forward &forward, torch::jit::Stack &stack);
  void runBackward(Forward &forward, torch::jit::Stack &stack);

  const plan::Plan &plan;
  Choose chooseBackend;
  std::map<at::SDPBackend, std::unique_ptr<Kernel>> kernels;
  std::map<size_t, Site> sites;
  /// By the value of the logsumexp, on the host and back on the device too.
  std::map<plan::ValueId, std::shared_ptr<Forward>> byLogsumexp;
  /// Per value on the host: the values that were copied there.
  std::map<plan::ValueId, std::vector<plan::ValueId>> offloaded;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_OPERATORS_ATTENTIONKERNELS_H
