//===- Buckets.h - neighbours that are gathered and reduced together ------===//
#ifndef FSDP_LIB_TRANSFORMS_SCHEDULE_BUCKETS_H
#define FSDP_LIB_TRANSFORMS_SCHEDULE_BUCKETS_H

#include "fsdp/Dialect/FSDP.h"
#include "fsdp/Simulate/DeviceModel.h"
#include "llvm/ADT/SetVector.h"

namespace mlir::fsdp {

/// Parameters of one policy and dtype, in the order of the module; or all of a
/// unit with several dtypes, which are reduced in their common one. By name, so
/// that it serves copies of the module too.
struct Bucket {
  StringAttr policy; ///< a unit whose policy all of `units` have
  Type dtype;        ///< null where there are several
  SmallVector<StringAttr> params;
  llvm::SetVector<StringAttr> units;
  double bytes = 0; ///< in the dtype of computing
};

/// Whether the two may be one bucket.
bool canJoin(ModuleOp module, const Bucket &a, const Bucket &b);
/// Puts the parameters of `from` behind those of `to`.
void join(Bucket &to, const Bucket &from);

/// Each parameter by itself; a unit of several dtypes stays whole. In the order
/// of units, and in each that of the module.
SmallVector<Bucket> splitUnits(ModuleOp module);
/// Joins neighbours of splitUnits until they have this many bytes.
SmallVector<Bucket> fillBuckets(ModuleOp module, double least);

/// The number of bytes that saturates the link of the shard axis: latency is a
/// tenth of a gather's time, within 10 and 500 MB (PyTorch Inductor's rule for
/// buckets of FSDP collectives).
double getSaturatingBytes(ModuleOp module,
                          const ::fsdp::simulate::DeviceModel &device);

/// One unit for each bucket, named after the units that its parameters come
/// from, with a number where these are in several buckets.
void replaceUnits(ModuleOp module, ArrayRef<Bucket> buckets);

} // namespace mlir::fsdp

#endif // FSDP_LIB_TRANSFORMS_SCHEDULE_BUCKETS_H
