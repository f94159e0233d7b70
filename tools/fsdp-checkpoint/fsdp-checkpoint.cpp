//===- fsdp-checkpoint.cpp - shows, verifies and converts checkpoints -----===//
#include "../CommandLine.h"
#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Checkpoint/Dcp.h"
#include "fsdp/Runtime/Checkpoint/HuggingFace.h"
#include "fsdp/Runtime/Checkpoint/NativeForm.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Files/SafeTensors.h"
#include "fsdp/Support/Message.h"
#include "fsdp/Support/Outputs.h"

#include <CLI/CLI.hpp>
#include <c10/util/Logging.h>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

using namespace fsdp::runtime;

namespace {

int report(const std::exception &error, int status) {
  return reportError("fsdp-checkpoint", error, status);
}

struct Opened {
  const char *form;
  SavedState state;
};

/// What some forms need besides the checkpoint itself.
struct Context {
  std::optional<NameMap> names;
  std::optional<fsdp::plan::Plan> plan;
  std::string planPath;
  NativeStart start;

  const NameMap *map() const { return names ? &*names : nullptr; }
  const fsdp::plan::Plan *knownPlan() const { return plan ? &*plan : nullptr; }
};

/// Reads all of a checkpoint, whatever its form.
Opened openCheckpoint(const std::string &path, const Context &context) {
  if (isNative(path))
    return {"native", readNative(path, context.knownPlan())};
  if (isDcp(path))
    return {"dcp", readDcp(path)};
  if (isHuggingFace(path))
    return {"huggingface", readHuggingFace(path, context.map())};
  std::error_code error;
  if (!std::filesystem::exists(path, error))
    throw InputError(path + ": not there");
  throw InputError(path + ": expected a checkpoint: a folder with "
                          "manifest.json, .metadata, "
                          "model.safetensors.index.json or "
                          "model.safetensors");
}

void printLine(const std::string &line) {
  std::printf("%s\n", fsdp::oneLine(line).c_str());
}

std::string counted(size_t count, const char *what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

std::string summary(const Opened &opened) {
  int64_t bytes = 0;
  size_t chunks = 0;
  for (const auto &[name, tensor] : opened.state.tensors) {
    bytes += tensor.spec.numBytes();
    chunks += tensor.chunks.size();
  }
  return std::string(opened.form) + ": " +
         counted(opened.state.tensors.size(), "tensor") + " in " +
         counted(chunks, "chunk") + ", " + counted(size_t(bytes), "byte") +
         ", " + counted(opened.state.values.size(), "value");
}

std::string show(const nlohmann::json &value) {
  if (value.is_binary())
    return counted(value.get_binary().size(), "byte");
  return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

void show(const std::string &path) {
  Opened opened = openCheckpoint(path, {});
  printLine(summary(opened));
  for (const auto &[name, tensor] : opened.state.tensors)
    printLine(name + ": " + describe(tensor.spec) + " in " +
              counted(tensor.chunks.size(), "chunk"));
  for (const auto &[name, value] : opened.state.values)
    printLine(name + " = " + show(value));
}

/// Drops what a model folder does not have: further names of tied parameters,
/// and buffers that a model makes itself.
void keepModel(SavedState &state, const fsdp::plan::Plan &plan) {
  for (const fsdp::plan::Param &param : plan.params)
    for (const std::string &alias : param.aliases)
      state.tensors.erase(alias);
  for (const fsdp::plan::Buffer &buffer : plan.buffers)
    if (!buffer.persistent)
      state.tensors.erase(buffer.name);
}

void convert(const std::string &from, const std::string &to,
             const std::string &form, const Context &context) {
  bool toModel = form == "huggingface", fromModel = isHuggingFace(from);
  if (context.names && toModel == fromModel)
    throw InputError("--name-map: expected one Hugging Face checkpoint and "
                     "one of another form, got " +
                     from + " to " + form);
  if (!context.plan && (form == "native" || (form == "dcp" && isNative(from))))
    throw InputError("--plan: expected the plan of the run, which has the "
                     "optimizer's options");
  Opened opened = openCheckpoint(from, context);
  if (form == "dcp") {
    writeDcp(to, opened.state);
  } else if (form == "native") {
    for (const std::string &remark :
         writeNative(to, from, opened.state, *context.plan, context.planPath,
                     context.start))
      printLine(remark);
  } else {
    if (context.plan)
      keepModel(opened.state, *context.plan);
    size_t ofOptimizer = 0;
    for (const std::string &name :
         writeHuggingFace(to, opened.state, context.map()))
      if (name.starts_with("optimizer."))
        ++ofOptimizer;
      else
        printLine("left out: " + name);
    // The form has no place for it: what its items are is no news.
    if (ofOptimizer)
      printLine("left out: the optimizer's state, " +
                counted(ofOptimizer, "item"));
  }
  printLine(to + ": from " + summary(opened));
}

/// What was printed may still be in memory.
void finishOutput() {
  if (std::fflush(stdout) != 0 || std::ferror(stdout))
    throw RunError(std::string("standard output: cannot be written: ") +
                   std::strerror(errno));
}

/// The command line, and what it asks for.
class Command {
public:
  explicit Command(CLI::App &app);

  /// Throws what is said on stderr.
  void run();

private:
  std::string from, to, form, mapPath;
  Context context;
  CLI::App *showing, *verifying, *converting;
  CLI::Option *seed, *samples;
};

Command::Command(CLI::App &app) {
  app.require_subcommand(1);
  showing = app.add_subcommand(
      "show", "verify a checkpoint, and print its tensors and values");
  showing->add_option("checkpoint", from, "its folder")->required();
  verifying = app.add_subcommand(
      "verify",
      "read all of a checkpoint: hashes, and that chunks tile tensors");
  verifying->add_option("checkpoint", from, "its folder")->required();
  converting =
      app.add_subcommand("convert", "write a checkpoint in another form");
  converting->add_option("from", from, "its folder")->required();
  converting->add_option("to", to, "a folder that is new or empty")->required();
  converting
      ->add_option("--to", form,
                   "native: fsdp-run's form; dcp: that of "
                   "torch.distributed.checkpoint; huggingface: safetensors "
                   "with an index, of the model only")
      ->required()
      ->check(CLI::IsMember({"native", "dcp", "huggingface"}));
  converting->add_option("--name-map", mapPath,
                         "JSON file: an object that maps our names to those of "
                         "Hugging Face, with {} for a number");
  converting->add_option("--plan", context.planPath,
                         "the plan of the run, for native checkpoints");
  seed = converting
             ->add_option("--seed", context.start.seed,
                          "with --to native: the seed to continue with, "
                          "as for fsdp-run --seed")
             ->capture_default_str()
             ->check(wholeNumber(0, kMaxSeed));
  samples =
      converting
          ->add_option("--samples", context.start.samples,
                       "with --to native: samples already taken from the data; "
                       "by default as many as the plan takes in that many "
                       "steps")
          ->check(wholeNumber(0, kMaxCount));
}

void Command::run() {
  for (const CLI::Option *option : {seed, samples})
    if (option->count() > 0 && form != "native")
      throw InputError(option->get_name() + ": expected --to native, got " +
                       form);
  if (!mapPath.empty())
    context.names.emplace(mapPath);
  if (!context.planPath.empty())
    context.plan = fsdp::plan::readPlan(context.planPath);
  if (showing->parsed())
    show(from);
  else if (verifying->parsed())
    printLine(from + ": whole: " + summary(openCheckpoint(from, {})));
  else
    convert(from, to, form, context);
  finishOutput();
}

} // namespace

int main(int argc, char **argv) {
  fsdp::reserveStandardStreams();
  // At a limit of file sizes, the write fails, with an error that names the
  // file.
  std::signal(SIGXFSZ, SIG_IGN);
  setenv("TORCH_CPP_LOG_LEVEL", "ERROR", /*overwrite=*/0);
  c10::initLogging();
  CLI::App app("Shows, verifies and converts checkpoints. The form of a "
               "checkpoint that is read is detected.\n"
               "Exit status: 0 success, 1 the conversion failed, 2 bad input.");
  Command command(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp &help) {
    return app.exit(help);
  } catch (const CLI::ParseError &error) {
    if (!app.get_subcommands().empty())
      return report(error, kExitBadInput);
    std::vector<std::string> given = app.remaining();
    return report(InputError("expected show, verify or convert, got " +
                             (given.empty() ? "none" : "\"" + given[0] + "\"")),
                  kExitBadInput);
  }
  try {
    command.run();
  } catch (const InputError &error) {
    return report(error, kExitBadInput);
  } catch (const fsdp::plan::PlanError &error) {
    return report(error, kExitBadInput);
  } catch (const std::exception &error) {
    return report(error, kExitRunFailure);
  }
  return 0;
}
