//===- Requests.h - one fsdp-opt for many runs ----------------------------===//
#ifndef FSDP_TOOLS_FSDPOPT_REQUESTS_H
#define FSDP_TOOLS_FSDPOPT_REQUESTS_H

#include "llvm/ADT/STLFunctionalExtras.h"
#include "llvm/ADT/StringRef.h"

namespace mlir::fsdp {

/// Whether a program's one argument asks for serveRequests.
bool asksForRequests(int argc, char **argv);

/// Answers each request of standard input, the arguments of a run as in a
/// response file up to a zero byte, by a process that calls `run` with them,
/// behind the program's name, and ends with the status that `run` returns.
/// These processes are forked from this one, which has loaded LibTorch once.
/// When a run has ended, writes "STATUS SIZE\n" to standard output, and SIZE
/// bytes: what the run wrote to its standard error. STATUS is a shell's: 128 +
/// the signal that ended the run. The run's standard input and output are
/// /dev/null. Returns, with the program's status, at the end of the input, or
/// when no request has come for a minute. There must be no other thread.
int serveRequests(llvm::StringRef program,
                  llvm::function_ref<int(int argc, char **argv)> run);

} // namespace mlir::fsdp

#endif // FSDP_TOOLS_FSDPOPT_REQUESTS_H
