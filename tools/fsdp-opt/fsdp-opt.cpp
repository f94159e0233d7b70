//===- fsdp-opt.cpp - graph transforms of sharded training ----------------===//
//
// Two ways in: as mlir-opt on .mlir files, pass by pass; and as one command on
// a captured model (see Driver.h).
//
//===----------------------------------------------------------------------===//
#include "Driver.h"

#include "fsdp/Transforms/Passes.h"
#include "mlir/Tools/mlir-opt/MlirOptMain.h"
#include "mlir/Transforms/Passes.h"

using namespace mlir;

int main(int argc, char **argv) {
  fsdp::registerFSDPPasses();
  fsdp::registerPipelines();
  registerCanonicalizerPass();
  registerCSEPass();
  registerSymbolDCEPass();

  DialectRegistry registry;
  registry.insert<fsdp::FSDPDialect, aten::AtenDialect>();
  auto [input, output] = registerAndParseCLIOptions(
      argc, argv, "fsdp-opt: compiler of fully sharded training\n", registry);
  if (fsdp::isDriverInvocation(input))
    return asMainReturnCode(fsdp::runDriver(input, output, registry));
  return asMainReturnCode(MlirOptMain(argc, argv, input, output, registry));
}
