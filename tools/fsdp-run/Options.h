//===- Options.h - what the command line says -----------------------------===//
#ifndef FSDP_TOOLS_FSDPRUN_OPTIONS_H
#define FSDP_TOOLS_FSDPRUN_OPTIONS_H

#include "fsdp/Runtime/Launch/RunFiles.h"

#include <cstdint>
#include <optional>

namespace fsdp::runtime {

struct Command {
  RunOptions options;
  std::optional<int64_t> ranks; ///< to start here
  bool dryRuns = false;
};

/// Nullopt if help was asked for, which is then printed. Throws
/// CLI::ParseError and InputError.
std::optional<Command> parseCommandLine(int argc, char **argv);

} // namespace fsdp::runtime

#endif // FSDP_TOOLS_FSDPRUN_OPTIONS_H
