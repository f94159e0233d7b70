//===- TrainingConfig.h - the config's keys about the update --------------===//
#ifndef FSDP_IMPORT_TRAININGCONFIG_H
#define FSDP_IMPORT_TRAININGCONFIG_H

#include "ConfigNode.h"

#include "mlir/IR/Builders.h"

namespace mlir::fsdp {

/// Optimizer, learning rate, clipping, accumulation, loss scaling: from the
/// config into policy ops, whose verifiers check what several keys say
/// together. Without an optimizer it is the default.
LogicalResult applyTraining(OpBuilder &builder, const ConfigNode &config);

/// AdamW with its defaults.
void createDefaultOptimizer(OpBuilder &builder, Location loc);

} // namespace mlir::fsdp

#endif // FSDP_IMPORT_TRAININGCONFIG_H
