//===- Schedule.h - the policy of the scheduling passes -------------------===//
#ifndef FSDP_TRANSFORMS_SCHEDULE_H
#define FSDP_TRANSFORMS_SCHEDULE_H

#include "fsdp/Dialect/FSDP.h"
#include "fsdp/Simulate/DeviceModel.h"

namespace mlir::fsdp {

/// The module's fsdp.schedule. If there is none, one with the defaults is
/// added.
ScheduleOp getOrCreateSchedule(ModuleOp module);

/// The description of the schedule's device, with its links to the other ranks
/// of the module's mesh. Errors name the description.
FailureOr<::fsdp::simulate::DeviceModel> loadDevice(ModuleOp module);

/// The memory that the module's plan is laid out for: `fsdp.memory`, or without
/// it that of the schedule's device.
FailureOr<::fsdp::plan::MemoryModel> getMemoryModel(ModuleOp module);

} // namespace mlir::fsdp

#endif // FSDP_TRANSFORMS_SCHEDULE_H
