//===- OperatorWork.h - FLOPs and bytes of an operator's call -------------===//
#ifndef FSDP_LIB_SIMULATE_OPERATORWORK_H
#define FSDP_LIB_SIMULATE_OPERATORWORK_H

#include "fsdp/Plan/Operands.h"
#include "fsdp/Plan/Plan.h"

#include <string_view>
#include <vector>

namespace fsdp::simulate {

struct OperatorWork {
  enum class Kind : uint8_t {
    Free,      ///< a view, or an allocation: no kernel runs
    Memory,    ///< takes the time of its bytes
    Matmul,    ///< matrix product or convolution
    Attention, ///< fused attention
  } kind = Kind::Memory;
  /// FLOPs that run, and those of the model's definition: attention as if it
  /// were not causal, its backward twice its forward (PaLM, arXiv:2204.02311,
  /// appendix B).
  double flops = 0, modelFlops = 0;
  /// Read and written, each storage once.
  double bytes = 0;
  /// Of the operands that are multiplied.
  plan::DType dtype = plan::DType::Float32;
  /// An Inductor-like compiler makes one kernel of several such: pointwise
  /// operators, reductions, and copies.
  bool fusable = false;
};

OperatorWork workOf(const plan::Plan &plan, const plan::Call &call);

/// The value that owns the storage.
inline plan::ValueId ownerOf(const plan::Plan &plan, plan::ValueId id) {
  plan::ValueId owner = plan.values[id].storage;
  return owner >= 0 ? owner : id;
}

/// Bytes of a value, and not more than its storage has: a broadcast view is
/// larger than what is read.
int64_t touchedBytes(const plan::Plan &plan, plan::ValueId id);

} // namespace fsdp::simulate

#endif // FSDP_LIB_SIMULATE_OPERATORWORK_H
