//===- Report.cpp - what the compiler's programs read, write and say ------===//
#include "Report.h"

#include "fsdp/Support/Files.h"
#include "fsdp/Support/Message.h"
#include "fsdp/Support/Nesting.h"
#include "mlir/Bytecode/BytecodeReader.h"

using namespace mlir;
using namespace mlir::fsdp;

static FailureOr<std::unique_ptr<llvm::MemoryBuffer>>
checkNesting(std::unique_ptr<llvm::MemoryBuffer> buffer) {
  if (!isBytecode(*buffer) &&
      ::fsdp::nestingOf(buffer->getBuffer()) > ::fsdp::kMaxNesting)
    return reportError(buffer->getBufferIdentifier() + ": nested deeper than " +
                       llvm::Twine(::fsdp::kMaxNesting));
  return buffer;
}

LogicalResult mlir::fsdp::reportError(const llvm::Twine &message) {
  llvm::errs() << programName << ": error: " << ::fsdp::oneLine(message.str())
               << '\n';
  return failure();
}

FailureOr<std::unique_ptr<llvm::MemoryBuffer>>
mlir::fsdp::readSource(llvm::StringRef path) {
  constexpr uint64_t maxBytes = uint64_t(4) << 30;
  if (path == "-") {
    auto buffer = llvm::MemoryBuffer::getSTDIN();
    if (!buffer)
      return reportError("stdin: cannot be read: " +
                         buffer.getError().message());
    return checkNesting(std::move(*buffer));
  }
  std::string text;
  if (std::string error = ::fsdp::readFile(path.str(), maxBytes, text);
      !error.empty())
    return reportError(path + ": " + error);
  return checkNesting(llvm::MemoryBuffer::getMemBufferCopy(text, path));
}

LogicalResult mlir::fsdp::writeOutput(llvm::StringRef path,
                                      llvm::StringRef text) {
  if (path == "-") {
    llvm::outs() << text;
    llvm::outs().flush();
    std::error_code error = llvm::outs().error();
    llvm::outs().clear_error();
    return error ? reportError("stdout: cannot be written: " + error.message())
                 : success();
  }
  std::string error = ::fsdp::writeFile(path.str(), text);
  return error.empty() ? success() : reportError(path + ": " + error);
}

ReportStream::~ReportStream() {
  if (!line.empty())
    llvm::errs() << ::fsdp::oneLine(line) << '\n';
}

void ReportStream::write_impl(const char *data, size_t size) {
  written += size;
  llvm::StringRef text(data, size);
  for (;;) {
    auto [head, tail] = text.split('\n');
    line += head;
    if (head.size() == text.size())
      return;
    llvm::errs() << ::fsdp::oneLine(line) << '\n';
    line.clear();
    text = tail;
  }
}

DiagnosticReport::DiagnosticReport(llvm::SourceMgr &sources,
                                   MLIRContext *context,
                                   llvm::raw_ostream &stream)
    : SourceMgrDiagnosticHandler(sources, context, stream) {
  setHandler([this](Diagnostic &diagnostic) { report(diagnostic); });
}

static StringRef severityOf(const Diagnostic &diagnostic) {
  switch (diagnostic.getSeverity()) {
  case DiagnosticSeverity::Note:
    return "note";
  case DiagnosticSeverity::Warning:
    return "warning";
  case DiagnosticSeverity::Error:
    return "error";
  case DiagnosticSeverity::Remark:
    return "remark";
  }
  llvm_unreachable("all severities are listed");
}

void DiagnosticReport::report(Diagnostic &diagnostic) {
  Location location = diagnostic.getLocation();
  if (location->findInstanceOf<FileLineColRange>())
    return emitDiagnostic(diagnostic);
  os << programName << ": " << severityOf(diagnostic) << ": ";
  if (auto name = location->findInstanceOf<NameLoc>())
    os << '\'' << name.getName().getValue() << "': ";
  os << diagnostic << '\n';
  for (Diagnostic &note : diagnostic.getNotes())
    report(note);
}
