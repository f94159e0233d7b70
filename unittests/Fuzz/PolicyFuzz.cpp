//===- PolicyFuzz.cpp - the reader of policies ----------------------------===//
#include "Compiler.h"
#include "Fuzz.h"
#include "fsdp/Import/Import.h"
#include "mlir/IR/Verifier.h"

using namespace fsdp;

/// What is accepted makes a module that verifies.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::InputFile file({reinterpret_cast<const char *>(data), size});
  fuzz::withDiagnostics([&](mlir::MLIRContext &context) -> llvm::LogicalResult {
    mlir::OwningOpRef<mlir::ModuleOp> module =
        mlir::ModuleOp::create(mlir::UnknownLoc::get(&context));
    if (failed(mlir::fsdp::applyConfig(*module, file.path(), /*worldSize=*/8)))
      return mlir::failure();
    return mlir::verify(*module);
  });
  return 0;
}
