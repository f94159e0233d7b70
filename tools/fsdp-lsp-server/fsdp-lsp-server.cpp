//===- fsdp-lsp-server.cpp - the dialects for editors ---------------------===//
//
// Speaks the Language Server Protocol on standard input and output: errors of
// parser and verifiers, definitions, uses and hover texts of .mlir files.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Dialect/Aten.h"
#include "fsdp/Dialect/FSDP.h"
#include "fsdp/Support/Outputs.h"
#include "mlir/IR/DialectRegistry.h"
#include "mlir/Tools/mlir-lsp-server/MlirLspServerMain.h"

int main(int argc, char **argv) {
  ::fsdp::reserveStandardStreams();
  mlir::DialectRegistry registry;
  registry.insert<mlir::fsdp::FSDPDialect, mlir::aten::AtenDialect>();
  return mlir::failed(mlir::MlirLspServerMain(argc, argv, registry));
}
