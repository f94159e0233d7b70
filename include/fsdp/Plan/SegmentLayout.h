//===- SegmentLayout.h - what the ranks of one host share -----------------===//
//
// The layout of the segment that runtime::ShmSegment maps, a function of the
// plan: the compiler knows it too, and therefore knows what a rank keeps.
//
// Reduce-scatter inputs. The j-th reduction of a step lies at the low end of
// the rank's area for even j and at the high end for odd j, in an area as big
// as the largest two neighbours: two reductions can be in flight at once. A
// gradient that is produced more than one reduction early has a place of its
// own after that area. With one rank per replica there is no such area.
//
// Each all-reduce input has a place of its own: the shards are read when the
// reductions are finished, those of each microbatch or of the last.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_PLAN_SEGMENTLAYOUT_H
#define FSDP_PLAN_SEGMENTLAYOUT_H

#include "fsdp/Plan/Plan.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fsdp::plan {

/// Byte offsets of everything in the segment.
struct SegmentLayout {
  /// `headerBytes`: the size of what comes first, whatever the plan.
  explicit SegmentLayout(const Plan &plan, size_t headerBytes = 0);

  int64_t worldSize;
  /// Per parameter: offset in its replica's parameters of what is gathered.
  std::vector<size_t> params;
  /// Per parameter: offset in its own dtype; the same without a cast. Behind
  /// the last row is room up to a multiple of rank 0's rows.
  std::vector<size_t> masters;
  /// Per parameter: offset of its gradient in a rank's area; unused for one
  /// that is not reduced.
  std::vector<size_t> grads;
  /// Per parameter: offset of its gradient's shard in a rank's area; unused
  /// for one that is not all-reduced.
  std::vector<size_t> shardGrads;
  /// Per parameter: what is all-reduced is the result of its reduce-scatter,
  /// which is written there.
  std::vector<bool> reducedInPlace;
  /// Per parameter: position of its reduction among the step's, or -1.
  std::vector<int32_t> reductionOf;
  /// Per parameter: has a place of its own in the area.
  std::vector<bool> dedicated;
  int32_t reductionsPerStep = 0;
  /// Room for one element per parameter, twice per rank.
  size_t vectorsBegin = 0;
  size_t vectorBytes = 0;
  size_t paramsBegin = 0;
  /// Bytes of one replica's parameters.
  size_t replicaBytes = 0;
  /// Where groups of ranks keep a parameter after forward: the first group at
  /// `begin` in the segment, the others after it.
  struct KeptPlace {
    int64_t group = 0; ///< ranks; 0: not kept
    size_t begin = 0;
    size_t stride = 0;
  };
  std::vector<KeptPlace> kept;
  size_t areasBegin = 0;
  size_t areaBytes = 0;
  size_t totalBytes = 0;

private:
  using Reductions = std::vector<const ReduceScatter *>;

  /// Lays out one replica's parameters; returns their bytes.
  size_t placeParams(const Plan &plan);
  /// Gradients that are produced more than one reduction early.
  void findDedicated(const Plan &plan);
  void placeGrads(const Plan &plan, const Reductions &reductions);
  void placeShardGrads(const Plan &plan, const Reductions &reductions);
  /// These lay out what comes from `end` on, and return where it ends: the
  /// vectors, and what groups keep.
  size_t placeVectors(const Plan &plan, size_t end);
  size_t placeKept(const Plan &plan, size_t end);
};

} // namespace fsdp::plan

#endif // FSDP_PLAN_SEGMENTLAYOUT_H
