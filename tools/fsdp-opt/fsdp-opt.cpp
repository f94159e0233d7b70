//===- fsdp-opt.cpp - graph transforms of sharded training ----------------===//
//
// Two ways in: as mlir-opt on .mlir files, pass by pass; and as one command on
// a captured model (see Driver.h).
//
//===----------------------------------------------------------------------===//
#include "../Report.h"
#include "Driver.h"
#include "Requests.h"

#include "fsdp/Support/Outputs.h"
#include "fsdp/Transforms/Passes.h"
#include "mlir/IR/DialectRegistry.h"
#include "mlir/IR/MLIRContext.h"
#include "mlir/Pass/PassManager.h"
#include "mlir/Tools/Plugins/DialectPlugin.h"
#include "mlir/Tools/Plugins/PassPlugin.h"
#include "mlir/Tools/mlir-opt/MlirOptMain.h"
#include "mlir/Transforms/Passes.h"
#include "llvm/Support/CommandLine.h"
#include "llvm/Support/SourceMgr.h"
#include "llvm/Support/StringSaver.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>

using namespace mlir;

constexpr llvm::StringLiteral mlir::fsdp::programName = "fsdp-opt";

namespace {
/// Prints diagnostics as the driver does, each line bounded (Message.h): a
/// diagnostic shows its source line, and that of a module with attributes grows
/// with the model. Loaded by the first of the dialect's ops, so after
/// MlirOptMain's own handler; the latest handler gets a diagnostic first.
struct BoundedDiagnostics
    : DialectExtension<BoundedDiagnostics, mlir::fsdp::FSDPDialect> {
  BoundedDiagnostics(llvm::SourceMgr &sources, llvm::raw_ostream &stream)
      : sources(&sources), stream(&stream) {}

  void apply(MLIRContext *context, mlir::fsdp::FSDPDialect *) const override {
    // For the life of the context, which MlirOptMain ends.
    new mlir::fsdp::DiagnosticReport(*sources, context, *stream);
  }

  llvm::SourceMgr *sources;
  llvm::raw_ostream *stream;
};
} // namespace

/// As mlir-opt does, except that the output is written completely or not at
/// all.
static LogicalResult runPassByPass(int argc, char **argv, StringRef input,
                                   StringRef output,
                                   DialectRegistry &registry) {
  auto config = MlirOptMainConfig::createFromCLOptions();
  if (config.shouldShowDialects() || config.shouldListPasses())
    return MlirOptMain(argc, argv, input, output, registry);
  if (failed(mlir::fsdp::checkFiles(input, output)))
    return failure();
  auto buffer = mlir::fsdp::readSource(input);
  if (failed(buffer))
    return failure();
  llvm::SourceMgr sources;
  mlir::fsdp::ReportStream errors;
  // The diagnostics of parts, and those that are expected, are for mlir-opt's
  // handlers.
  if (config.inputSplitMarker().empty() && !config.shouldVerifyDiagnostics()) {
    sources.AddNewSourceBuffer(
        llvm::MemoryBuffer::getMemBuffer((*buffer)->getMemBufferRef()), {});
    registry.addExtension(
        TypeID::get<BoundedDiagnostics>(),
        std::make_unique<BoundedDiagnostics>(sources, errors));
  }
  std::string text;
  llvm::raw_string_ostream stream(text);
  if (failed(MlirOptMain(stream, std::move(*buffer), registry, config)))
    return failure();
  return mlir::fsdp::writeOutput(output, text);
}

/// MLIR would only warn about a plug-in that it cannot load, and go on.
static LogicalResult verifyPlugins(ArrayRef<const char *> arguments) {
  for (size_t i = 1; i < arguments.size(); ++i) {
    StringRef argument = arguments[i];
    if (!argument.consume_front("-"))
      continue;
    argument.consume_front("-");
    bool isPass = argument.consume_front("load-pass-plugin");
    if (!isPass && !argument.consume_front("load-dialect-plugin"))
      continue;
    if (argument.empty() && i + 1 < arguments.size())
      argument = arguments[++i];
    else if (!argument.consume_front("="))
      continue;
    llvm::Error error = isPass
                            ? PassPlugin::load(argument.str()).takeError()
                            : DialectPlugin::load(argument.str()).takeError();
    if (error)
      return mlir::fsdp::reportError(llvm::toString(std::move(error)));
  }
  return success();
}

/// An op is where a diagnostic says; printed whole, that may be the module.
static void printNoOpsByDefault() {
  registerMLIRContextCLOptions();
  auto *option =
      llvm::cl::getRegisteredOptions().lookup("mlir-print-op-on-diagnostic");
  if (option)
    static_cast<llvm::cl::opt<bool> *>(option)->setInitialValue(false);
}

static int run(int count, char **given) {
  // A limit on the size of files is an error of a write, and no death.
  std::signal(SIGXFSZ, SIG_IGN);
  // Once, as a response file may be a pipe.
  llvm::BumpPtrAllocator allocator;
  llvm::StringSaver saver(allocator);
  SmallVector<const char *> arguments(given, given + count);
  if (!llvm::cl::ExpandResponseFiles(saver, llvm::cl::TokenizeGNUCommandLine,
                                     arguments))
    return 1; // it has said why
  if (failed(verifyPlugins(arguments)))
    return 1;
  auto argc = int(arguments.size());
  auto argv = const_cast<char **>(arguments.data());
  mlir::fsdp::hideLibraryOptions();
  printNoOpsByDefault();
  mlir::fsdp::registerFSDPPasses();
  mlir::fsdp::registerPipelines();
  registerCanonicalizerPass();
  registerCSEPass();
  registerSymbolDCEPass();

  DialectRegistry registry;
  registry.insert<mlir::fsdp::FSDPDialect, aten::AtenDialect>();
  auto [input, output] = registerAndParseCLIOptions(
      argc, argv, "fsdp-opt: compiler of fully sharded training\n", registry);
  if (mlir::fsdp::showInstructions(llvm::outs()))
    return 0;
  return asMainReturnCode(
      mlir::fsdp::isDriverInvocation(input)
          ? mlir::fsdp::runDriver(input, output, registry)
          : runPassByPass(argc, argv, input, output, registry));
}

static int runReporting(int argc, char **argv) {
  try {
    return run(argc, argv);
  } catch (const std::bad_alloc &) {
    return asMainReturnCode(mlir::fsdp::reportError("out of memory"));
  } catch (const std::exception &error) {
    return asMainReturnCode(mlir::fsdp::reportError(error.what()));
  }
}

static int runAndFlush(int argc, char **argv) {
  int status = runReporting(argc, argv);
  llvm::outs().flush();
  llvm::errs().flush();
  std::fflush(nullptr);
  return status;
}

int main(int argc, char **argv) {
  ::fsdp::reserveStandardStreams();
  int status = mlir::fsdp::asksForRequests(argc, argv)
                   ? mlir::fsdp::serveRequests(argv[0], runAndFlush)
                   : runAndFlush(argc, argv);
  // The destructors of PyTorch's and LLVM's libraries take a third of a run.
  std::_Exit(status);
}
