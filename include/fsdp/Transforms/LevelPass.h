//===- LevelPass.h - passes from one level to another ---------------------===//
#ifndef FSDP_TRANSFORMS_LEVELPASS_H
#define FSDP_TRANSFORMS_LEVELPASS_H

#include "fsdp/Dialect/FSDP.h"
#include "mlir/Pass/Pass.h"

namespace mlir::fsdp {

/// The base of the passes of Passes.td: takes a module at level `From` and
/// leaves it at `To`. A module at another level is rejected, so that passes run
/// in the order of the levels; a module that states no level is accepted as it
/// is.
template <Level From, Level To>
class LevelPass : public OperationPass<ModuleOp> {
public:
  using OperationPass::OperationPass;

  void runOnOperation() final {
    ModuleOp module = getOperation();
    if (failed(verifyLevel(module, From, "--" + this->getArgument())))
      return signalPassFailure();
    runOnModule();
    setLevel(module, To);
  }

protected:
  /// What the pass does; signalPassFailure() after an error.
  virtual void runOnModule() = 0;
};

} // namespace mlir::fsdp

#endif // FSDP_TRANSFORMS_LEVELPASS_H
