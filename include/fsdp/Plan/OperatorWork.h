//===- OperatorWork.h - FLOPs and bytes of an operator's call -------------===//
#ifndef FSDP_PLAN_OPERATORWORK_H
#define FSDP_PLAN_OPERATORWORK_H

#include "fsdp/Plan/Operands.h"
#include "fsdp/Plan/Plan.h"

#include <string_view>
#include <vector>

namespace fsdp::plan {

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
  DType dtype = DType::Float32;
  /// An Inductor-like compiler makes one kernel of several such operators:
  /// pointwise operators, reductions, and copies.
  bool fusable = false;
};

OperatorWork workOf(const Plan &plan, const Call &call);

/// Whether the operator, "aten::mm" or "aten::mm.out", is one whose result is
/// dear to compute again: a matrix product, a convolution, attention, or a
/// reduction over ranks.
bool isProduct(std::string_view op);

/// Floating-point operations that the model's step needs on one rank, over all
/// microbatches: matrix products, convolutions and attention in forward and
/// backward, with a multiply-add counted as two; attention as if it were not
/// causal; what is recomputed does not count. For a transformer this is PaLM's
/// 6 N + 12 L H Q T per token (arXiv:2204.02311, appendix B).
struct ModelWork {
  double flops = 0;
  /// The dtype of most of them, whose peak MFU is relative to.
  DType dtype = DType::Float32;
};

ModelWork modelWork(const Plan &plan);

/// The value that owns the storage.
inline ValueId ownerOf(const Plan &plan, ValueId id) {
  ValueId owner = plan.values[id].storage;
  return owner >= 0 ? owner : id;
}

/// Bytes of a value, and not more than its storage has: a broadcast view is
/// larger than what is read.
int64_t touchedBytes(const Plan &plan, ValueId id);

} // namespace fsdp::plan

#endif // FSDP_PLAN_OPERATORWORK_H
