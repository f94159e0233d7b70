//===- Compiler.cpp - what fuzz targets of the compiler share -------------===//
#include "Compiler.h"

#include "Fuzz.h"
#include "fsdp/Dialect/Aten.h"
#include "fsdp/Dialect/FSDP.h"

using namespace mlir;

void ::fsdp::fuzz::withDiagnostics(
    llvm::function_ref<LogicalResult(MLIRContext &)> body) {
  MLIRContext context(MLIRContext::Threading::DISABLED);
  context.loadDialect<mlir::fsdp::FSDPDialect, aten::AtenDialect>();
  context.printOpOnDiagnostic(false);
  int errors = 0;
  std::string messages;
  context.getDiagEngine().registerHandler([&](Diagnostic &diagnostic) {
    if (diagnostic.getSeverity() != DiagnosticSeverity::Error)
      return;
    ++errors;
    messages += diagnostic.str() + '\n';
  });
  bool failure = failed(body(context));
  // MLIR's parser may name more than one token.
  ::fsdp::fuzz::require(
      (errors > 0) == failure,
      failure ? "expected an error of what is refused, got none"
              : "expected no error of what is accepted, got: " + messages);
}
