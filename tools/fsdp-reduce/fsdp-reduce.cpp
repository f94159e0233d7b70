//===- fsdp-reduce.cpp - the smallest program that still shows a fault ----===//
//
// With the command line of mlir-reduce: leaves out what a test, a program that
// is given a file, does not need to fail.
//
//===----------------------------------------------------------------------===//
#include "../Report.h"
#include "Reduction.h"

#include "fsdp/Dialect/Aten.h"
#include "fsdp/Dialect/FSDP.h"
#include "fsdp/Support/Outputs.h"
#include "mlir/IR/Verifier.h"
#include "mlir/Parser/Parser.h"
#include "mlir/Pass/Pass.h"
#include "mlir/Pass/PassManager.h"
#include "mlir/Pass/PassRegistry.h"
#include "llvm/Support/CommandLine.h"
#include "llvm/Support/FileSystem.h"
#include "llvm/Support/FileUtilities.h"
#include "llvm/Support/Program.h"
#include "llvm/Support/Signals.h"
#include "llvm/Support/SourceMgr.h"

using namespace mlir;
using namespace mlir::fsdp;
namespace cl = llvm::cl;

constexpr llvm::StringLiteral mlir::fsdp::programName = "fsdp-reduce";

namespace {
cl::OptionCategory category("fsdp-reduce options");
cl::opt<std::string> inputPath(cl::Positional, cl::desc("<input file>"),
                               cl::init("-"), cl::cat(category));
cl::opt<std::string> outputPath("o", cl::desc("Output file"),
                                cl::value_desc("file"), cl::init("-"),
                                cl::cat(category));

struct ReductionTree : PassWrapper<ReductionTree, OperationPass<ModuleOp>> {
  MLIR_DEFINE_EXPLICIT_INTERNAL_INLINE_TYPE_ID(ReductionTree)

  ReductionTree() = default;
  ReductionTree(const ReductionTree &other) : PassWrapper(other) {}

  StringRef getArgument() const final { return "reduction-tree"; }
  StringRef getDescription() const final {
    return "Leave out what a test does not need to fail";
  }

  void runOnOperation() override {
    if (failed(reduce()))
      signalPassFailure();
  }

private:
  LogicalResult reduce() {
    if (traversalMode != 0)
      return reportError("--reduction-tree: traversal-mode: expected 0, got " +
                         Twine(traversalMode));
    if (test.empty())
      return reportError("--reduction-tree: expected test=PROGRAM");
    FailureOr<bool> shown = showsFault(getOperation());
    if (failed(shown))
      return failure();
    if (!*shown)
      return reportError(test + ": expected it to fail for the input, got " +
                         "exit status 0");
    FailureOr<OwningOpRef<ModuleOp>> smallest = reduceProgram(
        getOperation(), [&](ModuleOp program) { return showsFault(program); });
    if (failed(smallest))
      return failure();
    getOperation()->setAttrs((*smallest)->getOperation()->getAttrs());
    getOperation().getBodyRegion().takeBody((*smallest)->getBodyRegion());
    return success();
  }

  /// Whether the test fails on the program.
  FailureOr<bool> showsFault(ModuleOp program) {
    SmallString<128> path;
    int descriptor = -1;
    if (std::error_code error = llvm::sys::fs::createTemporaryFile(
            "fsdp-reduce", "mlir", descriptor, path))
      return reportError("a temporary file: cannot be created: " +
                         error.message());
    llvm::FileRemover remover(path);
    llvm::sys::RemoveFileOnSignal(path);
    llvm::raw_fd_ostream stream(descriptor, /*shouldClose=*/true);
    program->print(stream);
    stream << '\n';
    stream.close();
    if (std::error_code error = stream.error()) {
      stream.clear_error();
      return reportError(path + ": cannot be written: " + error.message());
    }
    SmallVector<StringRef> arguments = {test};
    llvm::append_range(arguments, testArguments);
    arguments.push_back(path);
    // Standard output may be where the program goes.
    std::optional<StringRef> redirects[] = {StringRef(), StringRef(),
                                            std::nullopt};
    std::string why;
    int status = llvm::sys::ExecuteAndWait(test, arguments, std::nullopt,
                                           redirects, /*SecondsToWait=*/0,
                                           /*MemoryLimit=*/0, &why);
    if (status == -1)
      return reportError(
          test + ": cannot be run: " + StringRef(why).rsplit(": ").second);
    return status != 0;
  }

  Option<std::string> test{
      *this, "test",
      cl::desc("A program that is given a file, and fails if it shows the "
               "fault")};
  ListOption<std::string> testArguments{
      *this, "test-arg", cl::desc("What the test is given before the file")};
  Option<unsigned> traversalMode{
      *this, "traversal-mode", cl::desc("As of mlir-reduce, which has only 0"),
      cl::init(0)};
};

LogicalResult run(const PassPipelineCLParser &passes) {
  if (!passes.hasAnyOccurrences())
    return reportError("expected --reduction-tree='test=PROGRAM'");
  std::vector<::fsdp::NamedFile> inputs, outputs;
  if (inputPath != "-")
    inputs.push_back({"the input", inputPath});
  if (outputPath != "-")
    outputs.push_back({"-o", outputPath});
  if (std::string error = ::fsdp::checkOutputs(outputs, inputs); !error.empty())
    return reportError(error);
  auto buffer = readSource(inputPath);
  if (failed(buffer))
    return failure();
  DialectRegistry registry;
  registry.insert<FSDPDialect, aten::AtenDialect>();
  MLIRContext context(registry, MLIRContext::Threading::DISABLED);
  context.printOpOnDiagnostic(false);
  // Calls of zeros are made in programs without any call.
  context.loadDialect<FSDPDialect, aten::AtenDialect>();
  llvm::SourceMgr sources;
  sources.AddNewSourceBuffer(std::move(*buffer), llvm::SMLoc());
  ReportStream errors;
  DiagnosticReport diagnostics(sources, &context, errors);
  OwningOpRef<ModuleOp> program = parseSourceFile<ModuleOp>(sources, &context);
  if (!program)
    return failure();
  PassManager manager(&context);
  if (failed(passes.addToPipeline(manager,
                                  [](const Twine &message) {
                                    return reportError(
                                        StringRef(message.str()).rtrim());
                                  })) ||
      failed(manager.run(*program)))
    return failure();
  std::string text;
  llvm::raw_string_ostream stream(text);
  program->print(stream);
  stream << '\n';
  return writeOutput(outputPath, text);
}
} // namespace

int main(int argc, char **argv) {
  ::fsdp::reserveStandardStreams();
  PassRegistration<ReductionTree>();
  cl::HideUnrelatedOptions(category);
  PassPipelineCLParser passes("", "Passes that reduce the program");
  cl::ParseCommandLineOptions(
      argc, argv, "fsdp-reduce: the smallest program that still shows a fault");
  return failed(run(passes));
}
