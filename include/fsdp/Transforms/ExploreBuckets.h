//===- ExploreBuckets.h - what to gather and reduce together --------------===//
//
// The candidates are FSDP2's units, each parameter by itself, neighbours until
// the link is saturated, and some of the contiguous partitions that
// OptimalBuckets.h finds with the numbers of the second candidate, from the
// fastest to the smallest. Each is compiled like the module itself, laid out
// and simulated.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_TRANSFORMS_EXPLOREBUCKETS_H
#define FSDP_TRANSFORMS_EXPLOREBUCKETS_H

#include "fsdp/Dialect/FSDP.h"
#include "fsdp/Simulate/DeviceModel.h"
#include "fsdp/Simulate/LowerBound.h"

#include <optional>
#include <string>

namespace mlir::fsdp {

struct BucketOutcome {
  /// "unit", "parameter", "saturation" or "optimal".
  std::string name;
  /// The parameters of each bucket; none for FSDP2's units.
  SmallVector<SmallVector<StringAttr>> buckets;
  int64_t count = 0;  ///< of buckets
  double seconds = 0; ///< of a simulated step
  double exposed = 0; ///< of these, exposed communication
  int64_t bytes = 0;  ///< a rank's peak
  /// A lower bound on the time of every schedule of every candidate.
  ::fsdp::simulate::LowerBound bound;
  std::string holders; ///< of most bytes at the peak
};

/// All candidates of a module whose units are assigned, in the order above.
FailureOr<SmallVector<BucketOutcome>>
exploreBuckets(ModuleOp module, const ::fsdp::simulate::DeviceModel &device);

/// The fastest that fits into the budget; of those within a ten-thousandth of
/// its time, the one with the fewest bytes, then the first. Null if none fits.
const BucketOutcome *chooseBuckets(ArrayRef<BucketOutcome> outcomes,
                                   std::optional<uint64_t> budget);

/// "optimal, 37 buckets: 507.100 ms, 3.200 ms of it exposed, 40.10 GiB".
std::string describe(const BucketOutcome &outcome);

/// Makes the buckets of an outcome the units of the module.
void applyBuckets(ModuleOp module, const BucketOutcome &outcome);

} // namespace mlir::fsdp

#endif // FSDP_TRANSFORMS_EXPLOREBUCKETS_H
