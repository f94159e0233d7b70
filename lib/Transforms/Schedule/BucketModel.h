//===- BucketModel.h - the numbers of a step that buckets depend on -------===//
#ifndef FSDP_LIB_TRANSFORMS_SCHEDULE_BUCKETMODEL_H
#define FSDP_LIB_TRANSFORMS_SCHEDULE_BUCKETMODEL_H

#include "OptimalBuckets.h"
#include "fsdp/Transforms/CompileStep.h"
#include "llvm/ADT/ArrayRef.h"
#include "llvm/ADT/StringMap.h"

namespace mlir::fsdp {

/// Reads off a step, in which every item is a unit by itself: when each is
/// used, what it moves and holds, and what else is alive meanwhile. `itemOf`
/// has the item of each parameter by its name; `kinds`, by item, which of them
/// may be joined. Only one of the step's microbatches is modelled.
BucketProblem modelBuckets(const CompiledStep &step,
                           const ::fsdp::simulate::DeviceModel &device,
                           const llvm::StringMap<int32_t> &itemOf,
                           llvm::ArrayRef<int32_t> kinds,
                           int64_t reducesInFlight);

} // namespace mlir::fsdp

#endif // FSDP_LIB_TRANSFORMS_SCHEDULE_BUCKETMODEL_H
