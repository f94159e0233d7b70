//===- ProgramFuzz.cpp - programs as text, through every pass -------------===//
//
// The verifier runs after each pass.
//
//===----------------------------------------------------------------------===//
#include "Compiler.h"
#include "Fuzz.h"
#include "fsdp/Import/Import.h"
#include "fsdp/Plan/Memory.h"
#include "fsdp/Support/Nesting.h"
#include "fsdp/Transforms/EmitPlan.h"
#include "fsdp/Transforms/Passes.h"
#include "mlir/Parser/Parser.h"
#include "mlir/Pass/PassManager.h"

using namespace fsdp;

/// Captured or lower level to a plan, which verifies.
static llvm::LogicalResult compile(llvm::StringRef text,
                                   mlir::MLIRContext &context) {
  auto module = mlir::parseSourceString<mlir::ModuleOp>(text, &context);
  if (!module)
    return mlir::failure();
  if (module->getOps<mlir::fsdp::MeshOp>().empty() &&
      failed(mlir::fsdp::applyDefaultConfig(*module, /*worldSize=*/2)))
    return mlir::failure();
  mlir::PassManager pm(&context);
  mlir::fsdp::buildPipeline(pm);
  if (failed(pm.run(*module)))
    return mlir::failure();
  auto plan = mlir::fsdp::emitPlan(*module);
  if (failed(plan))
    return mlir::failure();
  try {
    plan::verifyPlan(*plan, "plan");
    plan::layOutArena(*plan, plan::MemoryModel::SharedHost);
    plan::verifyPlan(*plan, "plan");
    plan::printPlan(*plan);
  } catch (const plan::PlanError &error) {
    return module->emitError(error.what());
  }
  return mlir::success();
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  llvm::StringRef text(reinterpret_cast<const char *>(data), size);
  if (nestingOf(text) > kMaxNesting)
    return 0; // refused by fsdp-opt
  fuzz::withDiagnostics(
      [&](mlir::MLIRContext &context) { return compile(text, context); });
  return 0;
}
