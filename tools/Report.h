//===- Report.h - what the compiler's programs read, write and say --------===//
#ifndef FSDP_TOOLS_REPORT_H
#define FSDP_TOOLS_REPORT_H

#include "mlir/IR/Diagnostics.h"
#include "mlir/Support/LogicalResult.h"
#include "llvm/ADT/StringRef.h"
#include "llvm/ADT/Twine.h"
#include "llvm/Support/MemoryBuffer.h"
#include "llvm/Support/raw_ostream.h"

#include <memory>
#include <string>

namespace mlir::fsdp {

/// Each program defines its own: "fsdp-opt".
extern const llvm::StringLiteral programName;

/// Prints the program, ": error: " and the message as one line (Message.h).
LogicalResult reportError(const llvm::Twine &message);

/// A source file's text, nested no deeper than Nesting.h allows; for "-", the
/// text from stdin. Prints errors itself.
FailureOr<std::unique_ptr<llvm::MemoryBuffer>> readSource(llvm::StringRef path);

/// Writes a file, completely or not at all; "-" is stdout. Prints errors
/// itself.
LogicalResult writeOutput(llvm::StringRef path, llvm::StringRef text);

/// Passes text on to stderr line by line, each escaped as by Message.h.
class ReportStream : public llvm::raw_ostream {
public:
  ReportStream() : raw_ostream(/*unbuffered=*/true) {}
  ~ReportStream() override;

private:
  void write_impl(const char *data, size_t size) override;
  uint64_t current_pos() const override { return written; }

  std::string line;
  uint64_t written = 0;
};

/// Prints a context's diagnostics, each line escaped and bounded. One that is
/// at no line of a file, as that of a parameter, begins with the program and
/// the name of what it is about: "fsdp-opt: error: 'head.bias': …".
class DiagnosticReport : public SourceMgrDiagnosticHandler {
public:
  DiagnosticReport(llvm::SourceMgr &sources, MLIRContext *context,
                   llvm::raw_ostream &stream);

private:
  void report(Diagnostic &diagnostic);
};

} // namespace mlir::fsdp

#endif // FSDP_TOOLS_REPORT_H
