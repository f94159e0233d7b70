//===- fsdp-run.cpp - executes a plan on N ranks --------------------------===//
#include "../CommandLine.h"
#include "Options.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Launch/DryRun.h"
#include "fsdp/Runtime/Launch/Launcher.h"
#include "fsdp/Support/Outputs.h"

#include <c10/util/Logging.h>

#include <csignal>
#include <cstdlib>
#include <exception>
#include <optional>

using namespace fsdp::runtime;

static int report(const std::exception &error, int status) {
  return reportError("fsdp-run", error, status);
}

static RunEnd run(const Command &command) {
  if (command.dryRuns) {
    dryRun(command.options, command.ranks);
    return RunEnd::Finished;
  }
  if (!command.ranks)
    if (std::optional<RankEnvironment> environment = rankEnvironment())
      return runUnderTorchrun(command.options, *environment);
  return runForked(command.options, command.ranks);
}

int main(int argc, char **argv) {
  fsdp::reserveStandardStreams();
  // At a limit of file sizes, the write fails, with an error that names the
  // file.
  std::signal(SIGXFSZ, SIG_IGN);
  // c10d logs at length about a peer that is gone or does not come; this
  // program reports that itself.
  setenv("TORCH_CPP_LOG_LEVEL", "FATAL", /*overwrite=*/0);
  c10::initLogging();
  try {
    std::optional<Command> command = parseCommandLine(argc, argv);
    if (!command)
      return 0;
    switch (run(*command)) {
    case RunEnd::Finished:
      return 0;
    case RunEnd::Stopped:
      return kExitStopped;
    case RunEnd::StoppedAtOnce:
      return kExitStoppedAtOnce;
    }
  } catch (const CLI::ParseError &error) {
    return report(error, kExitBadInput);
  } catch (const InputError &error) {
    return report(error, kExitBadInput);
  } catch (const fsdp::plan::PlanError &error) {
    return report(error, kExitBadInput);
  } catch (const AbortedError &) {
    return kExitRunFailure; // the rank that failed says why
  } catch (const std::exception &error) {
    return report(error, kExitRunFailure);
  }
  return 0;
}
