//===- StepModel.h - time and memory of a step, for scheduling passes -----===//
#ifndef FSDP_LIB_TRANSFORMS_SCHEDULE_STEPMODEL_H
#define FSDP_LIB_TRANSFORMS_SCHEDULE_STEPMODEL_H

#include "fsdp/Dialect/FSDP.h"
#include "fsdp/Plan/Memory.h"
#include "fsdp/Simulate/CostModel.h"
#include "fsdp/Simulate/DeviceModel.h"
#include "fsdp/Transforms/Schedule.h"

#include <memory>

namespace mlir::fsdp {

/// The training step as the plan that would be emitted now, with the costs of
/// the schedule's device: the numbers that decisions rest on are those that the
/// simulator and the memory replay report afterwards.
struct StepModel {
  /// Leaves the module as it is. Errors name the device's description.
  static FailureOr<StepModel> build(ModuleOp module);

  /// Instructions, in the order of `ops`: those that each op becomes.
  ::fsdp::plan::Plan plan;
  SmallVector<Operation *> ops;
  ::fsdp::simulate::DeviceModel device;
  ::fsdp::simulate::StepCost cost;
  ::fsdp::plan::Memory memory;
  /// Bytes a rank keeps all the time.
  int64_t staticBytes = 0;

  /// Seconds of the compute stream before each instruction, if nothing has to
  /// be waited for; one more entry for the end.
  std::vector<double> computeTime() const;
};

} // namespace mlir::fsdp

#endif // FSDP_LIB_TRANSFORMS_SCHEDULE_STEPMODEL_H
