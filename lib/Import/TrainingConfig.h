//===- TrainingConfig.h - the config's keys about the update --------------===//
#ifndef FSDP_IMPORT_TRAININGCONFIG_H
#define FSDP_IMPORT_TRAININGCONFIG_H

#include "ConfigNode.h"

#include "mlir/IR/Builders.h"

namespace mlir::fsdp {

/// Optimizer, learning rate, clipping, accumulation, loss scaling: from YAML
/// into policy ops, whose verifiers check ranges.
class TrainingConfig : ConfigNodeReader {
public:
  using ConfigNodeReader::ConfigNodeReader;

  /// The keys that take() accepts.
  static ArrayRef<StringRef> getKeys();
  /// Remembers the value of one of getKeys(); false for another key. The node
  /// must live until apply().
  bool take(StringRef key, const Node &value);
  /// Creates the policy. Without an optimizer in the config it is the default.
  LogicalResult apply(OpBuilder &builder);

private:
  LogicalResult applyOptimizer(OpBuilder &builder, const Node *node);
  LogicalResult applyGroup(OpBuilder &builder, const Node &node);
  LogicalResult applySchedule(OpBuilder &builder, const Node &node);
  LogicalResult applyClipping(OpBuilder &builder, const Node &node);
  LogicalResult applyAccumulation(OpBuilder &builder);
  LogicalResult applyScaler(OpBuilder &builder, const Node &node);
  /// One hyperparameter into `result`; `key` is torch.optim's.
  LogicalResult readHyperparameter(OpBuilder &builder, StringRef key,
                                   const Node &value,
                                   SmallVectorImpl<NamedAttribute> &result);

  const Node *optimizer = nullptr, *schedule = nullptr, *clipping = nullptr,
             *accumulationSteps = nullptr, *reduceEach = nullptr,
             *allReduceEach = nullptr, *reshardAfterBackward = nullptr,
             *scaler = nullptr;
};

/// AdamW with its defaults.
void createDefaultOptimizer(OpBuilder &builder, Location loc);

} // namespace mlir::fsdp

#endif // FSDP_IMPORT_TRAININGCONFIG_H
