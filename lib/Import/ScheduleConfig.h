//===- ScheduleConfig.h - the config's key `schedule` ---------------------===//
#ifndef FSDP_IMPORT_SCHEDULECONFIG_H
#define FSDP_IMPORT_SCHEDULECONFIG_H

#include "ConfigNode.h"

#include "mlir/IR/Builders.h"

namespace mlir::fsdp {

/// From YAML into an fsdp.schedule, whose verifier checks names and ranges.
class ScheduleConfig : ConfigNodeReader {
public:
  using ConfigNodeReader::ConfigNodeReader;

  /// `node` is the value of `schedule`: "fsdp2", FSDP2's own order, or a
  /// mapping. A device's description is looked for beside the config.
  LogicalResult apply(OpBuilder &builder, const Node &node);
};

} // namespace mlir::fsdp

#endif // FSDP_IMPORT_SCHEDULECONFIG_H
