//===- SegmentSights.h - what a rank of a segment sees of the others ------===//
#ifndef FSDP_RUNTIME_COLLECTIVES_SEGMENTSIGHTS_H
#define FSDP_RUNTIME_COLLECTIVES_SEGMENTSIGHTS_H

#include "fsdp/Runtime/Collectives/Patience.h"
#include "fsdp/Runtime/Collectives/ShmSegment.h"

namespace fsdp::runtime {

/// The sights of ranks whose states lie in one segment, whatever carries their
/// collectives.
class SegmentSights final : public RankSights {
public:
  /// Borrows the segment. `rank`: the rank whose waits are counted; -1 for the
  /// launcher, which is not a rank.
  SegmentSights(ShmSegment &segment, int64_t rank)
      : segment(segment), rank(rank) {}

  std::vector<RankSight> look() override;
  std::string obstacle(int64_t rank) override;
  int32_t process(int64_t rank) override;
  void addWaits(int change) override;

private:
  ShmSegment &segment;
  const int64_t rank;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_COLLECTIVES_SEGMENTSIGHTS_H
