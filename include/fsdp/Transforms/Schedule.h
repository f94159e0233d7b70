//===- Schedule.h - the policy of the scheduling passes -------------------===//
#ifndef FSDP_TRANSFORMS_SCHEDULE_H
#define FSDP_TRANSFORMS_SCHEDULE_H

#include "fsdp/Dialect/FSDP.h"

namespace mlir::fsdp {

/// The module's fsdp.schedule. Where it has none, one with the defaults is
/// added.
ScheduleOp getSchedule(ModuleOp module);

} // namespace mlir::fsdp

#endif // FSDP_TRANSFORMS_SCHEDULE_H
