//===- CompileStep.cpp - what a step would cost ---------------------------===//
#include "fsdp/Transforms/CompileStep.h"

#include "fsdp/Plan/Memory.h"
#include "fsdp/Simulate/Format.h"
#include "fsdp/Simulate/Simulator.h"
#include "fsdp/Transforms/EmitPlan.h"
#include "fsdp/Transforms/Passes.h"
#include "mlir/IR/Diagnostics.h"
#include "mlir/Pass/PassManager.h"
#include "llvm/ADT/StringExtras.h"

using namespace mlir;
using namespace mlir::fsdp;
namespace plan = ::fsdp::plan;
namespace simulate = ::fsdp::simulate;

static FailureOr<plan::Plan>
emitChanged(ModuleOp module, llvm::function_ref<void(ModuleOp)> change) {
  OwningOpRef<ModuleOp> copy = module.clone();
  change(*copy);
  PassManager pm(module.getContext());
  pm.enableVerifier(false);
  buildAfterChoicePipeline(pm);
  buildSchedulePipeline(pm);
  buildUnplacedPipeline(pm);
  if (failed(pm.run(*copy)))
    return failure();
  return emitPlan(*copy);
}

static std::string describePeak(const plan::Plan &plan,
                                plan::MemoryModel model) {
  auto uses = plan::usesAtPeak(plan, plan::replayMemory(plan, model), model);
  SmallVector<std::string> holders;
  for (auto &[bytes, use] : ArrayRef(uses).take_front(3))
    holders.push_back(
        (plan::memoryUseName(use) + Twine(" ") + simulate::formatBytes(bytes))
            .str());
  return llvm::join(holders, ", ");
}

FailureOr<CompiledStep>
mlir::fsdp::compileStep(ModuleOp module, const simulate::DeviceModel &device,
                        llvm::function_ref<void(ModuleOp)> change) {
  ScopedDiagnosticHandler quiet(module.getContext(), [](Diagnostic &message) {
    return success(message.getSeverity() != DiagnosticSeverity::Error);
  });
  FailureOr<plan::Plan> emitted = emitChanged(module, change);
  if (failed(emitted))
    return failure();
  CompiledStep step;
  step.plan = std::move(*emitted);
  plan::MemoryModel model = device.memoryModel();
  plan::layOutArena(step.plan, model);
  step.bytes = plan::peakBytes(step.plan, model);
  step.holders = describePeak(step.plan, model);
  step.cost = simulate::costOf(step.plan, device);
  simulate::Timeline timeline =
      simulate::simulate(step.plan, step.cost, device);
  step.seconds = timeline.seconds;
  step.exposed = timeline.exposedCommunication();
  return step;
}
