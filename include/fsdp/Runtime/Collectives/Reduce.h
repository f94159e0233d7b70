//===- Reduce.h - sums of gradients in a given dtype ----------------------===//
#ifndef FSDP_RUNTIME_COLLECTIVES_REDUCE_H
#define FSDP_RUNTIME_COLLECTIVES_REDUCE_H

#include "fsdp/Plan/Plan.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fsdp::runtime {

/// How gradients are reduced to one: each is cast from `in` to `reduce`,
/// divided by `predivide` and multiplied by `premultiply`, rounded to `reduce`;
/// they are added in order and the sum is divided by `postdivide`; every result
/// is rounded to `reduce` as PyTorch rounds. Then a cast to `out`. All three
/// are floating-point dtypes, or one complex dtype, whose two parts are reduced
/// each by itself: they are divided by powers of 2 alone.
struct GradReduction {
  plan::DType in = plan::DType::Float32;
  plan::DType reduce = plan::DType::Float32;
  plan::DType out = plan::DType::Float32;
  double predivide = 1;
  double postdivide = 1;
  double premultiply = 1;

  bool casts() const { return in != reduce || reduce != out; }
  /// Whether the reduction of a single gradient is that gradient itself.
  bool isIdentity() const {
    return !casts() && predivide == 1 && postdivide == 1 && premultiply == 1;
  }
};

/// The reduction of the `index`-th parameter of `reduce`.
GradReduction makeGradReduction(const plan::Plan &plan,
                                const plan::ReduceScatter &reduce,
                                size_t index);
GradReduction makeGradReduction(const plan::Plan &plan,
                                const plan::AllReduce &reduce, size_t index);

/// Writes `count` elements of the reduction of `in` (at least one term, added
/// in this order) to `out`, which must not be one of them.
void reduceInOrder(const GradReduction &reduction, void *out,
                   const std::vector<const std::byte *> &in, int64_t count);

/// The same of the elements from `begin` on of a message of `elements`, of
/// which rank r has those of `in[r]`: in the order in which Gloo adds them
/// (plan::ringPiece).
void reduceAroundRing(const GradReduction &reduction, void *out,
                      const std::vector<const std::byte *> &in, int64_t count,
                      int64_t begin, int64_t elements);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_COLLECTIVES_REDUCE_H
