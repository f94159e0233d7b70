//===- Outputs.h - where programs write -----------------------------------===//
#ifndef FSDP_SUPPORT_OUTPUTS_H
#define FSDP_SUPPORT_OUTPUTS_H

#include "fsdp/Support/Files.h"

#include <string>
#include <vector>

namespace fsdp {

/// Opens those of the descriptors 0 to 2 that are closed, so that no file gets
/// their numbers and what is printed. Reading from them, or writing to them,
/// fails as before. For the beginning of a program.
void reserveStandardStreams();

/// As open(2) with O_WRONLY and `flags`, but for a pipe that nobody has opened
/// for reading after `waitSeconds` it fails. The descriptor; or -1, and why.
int openForWriting(const std::string &path, int flags, std::string &error,
                   int waitSeconds = kPipeWaitSeconds);

/// A file that is read or written, and what messages call it: its option.
struct NamedFile {
  std::string name, path;
};

/// What is wrong if an output is an input or another output, which would be
/// lost: "--trace and --data: expected two files, got one: x"; or nothing.
/// Files are compared, not their names. Only regular files can be lost.
[[nodiscard]] std::string checkOutputs(const std::vector<NamedFile> &outputs,
                                       const std::vector<NamedFile> &inputs);

} // namespace fsdp

#endif // FSDP_SUPPORT_OUTPUTS_H
