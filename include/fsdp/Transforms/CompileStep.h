//===- CompileStep.h - what a step would cost -----------------------------===//
//
// Choices that change what is gathered, kept or computed are compared by their
// outcome: a copy of the module with the choice made is compiled like the
// module itself, laid out and simulated.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_TRANSFORMS_COMPILESTEP_H
#define FSDP_TRANSFORMS_COMPILESTEP_H

#include "fsdp/Dialect/FSDP.h"
#include "fsdp/Plan/Plan.h"
#include "fsdp/Simulate/CostModel.h"
#include "fsdp/Simulate/DeviceModel.h"
#include "llvm/ADT/STLFunctionalExtras.h"

#include <string>

namespace mlir::fsdp {

/// A step on a device.
struct CompiledStep {
  ::fsdp::plan::Plan plan; ///< with its arena
  ::fsdp::simulate::StepCost cost;
  double seconds = 0; ///< simulated
  double exposed = 0; ///< of these, exposed communication
  int64_t bytes = 0;  ///< a rank's peak
  /// "activations 3.00 GiB, …": the three uses with most bytes at the peak.
  std::string holders;
};

/// Compiles a copy of a module whose units are assigned; `change` makes the
/// choice in it. Of the passes' diagnostics, only errors are reported.
FailureOr<CompiledStep> compileStep(ModuleOp module,
                                    const ::fsdp::simulate::DeviceModel &device,
                                    llvm::function_ref<void(ModuleOp)> change);

} // namespace mlir::fsdp

#endif // FSDP_TRANSFORMS_COMPILESTEP_H
