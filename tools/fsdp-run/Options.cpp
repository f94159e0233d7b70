//===- Options.cpp - what the command line says ---------------------------===//
#include "Options.h"
#include "../CommandLine.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Operators/KernelTable.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <map>
#include <string>
#include <thread>

using namespace fsdp::runtime;

namespace {

const std::map<std::string, Backend> kBackends = {
    {"shm", Backend::Shm}, {"gloo", Backend::Gloo}, {"nccl", Backend::Nccl}};

Fault parseFault(const std::string &text) {
  long long rank = 0, step = 0, instruction = 0;
  char kind[8] = {};
  if (std::sscanf(text.c_str(), "%lld:%lld:%lld:%7s", &rank, &step,
                  &instruction, kind) != 4 ||
      (std::string(kind) != "kill" && std::string(kind) != "throw"))
    throw InputError("--inject-fault: expected "
                     "rank:step:instruction:kill|throw, got \"" +
                     text + "\"");
  return {rank, step, instruction, std::string(kind) == "kill"};
}

SaveFault parseSaveFault(const std::string &text) {
  long long rank = 0, step = 0, times = 0;
  int signal = 0;
  char point[24] = {};
  const auto *known = kSavePoints.end();
  if (std::sscanf(text.c_str(), "%23[^:]:%lld:%lld:%lld:%d", point, &rank,
                  &step, &times, &signal) == 5)
    known = std::find(kSavePoints.begin() + 1, kSavePoints.end(), point);
  if (known == kSavePoints.end())
    throw InputError("--checkpoint-fault: expected "
                     "point:rank:step:times:signal, got \"" +
                     text + "\"");
  return {rank, step, SavePoint(known - kSavePoints.begin()), times, signal};
}

/// "90", "0.5", "1:30:00": seconds, or hours, minutes and seconds; nullopt for
/// anything else, and for an empty text.
std::optional<double> parseDuration(const std::string &text) {
  double parts[3] = {};
  size_t count = 0;
  const char *at = text.data(), *end = at + text.size();
  for (; count < 3; ++count) {
    auto read =
        std::from_chars(at, end, parts[count], std::chars_format::fixed);
    bool whole = std::all_of(at, read.ptr, [](char c) { return c != '.'; });
    if (read.ec != std::errc() || *at == '-')
      return std::nullopt;
    at = read.ptr;
    if (at == end)
      break;
    if (*at++ != ':' || !whole)
      return std::nullopt;
  }
  double seconds = parts[0];
  if (count == 2 && parts[1] < 60 && parts[2] < 60)
    seconds = parts[0] * 3600 + parts[1] * 60 + parts[2];
  else if (count != 0)
    return std::nullopt;
  bool fits = seconds >= 0.001 && seconds <= 1e9;
  return fits ? std::optional<double>(seconds) : std::nullopt;
}

const CLI::Validator kDuration(
    [](const std::string &text) -> std::string {
      if (parseDuration(text))
        return {};
      return "expected seconds, or HH:MM:SS, got \"" + text.substr(0, 80) +
             "\"";
    },
    "");

/// Others would make an MFU that is no number.
const CLI::Validator kRate(
    [](const std::string &text) -> std::string {
      double value = 0;
      const char *end = text.data() + text.size();
      auto read = std::from_chars(text.data(), end, value);
      if (read.ptr == end && read.ec == std::errc() && value >= 1 &&
          value <= 1e30)
        return {};
      return "expected a number from 1 to 1e30, got \"" + text.substr(0, 80) +
             "\"";
    },
    "");

/// The options of the program, by what they are about, and what they say.
class Parser {
public:
  Parser() {
    addRun();
    addData();
    addReports();
    addWeights();
    addExecution();
    addEvaluation();
    addLimits();
    addCheckpoints();
    addTesting();
  }

  /// Whether there is something to run: false if help was asked for.
  bool parse(int argc, char **argv) {
    try {
      app.parse(argc, argv);
    } catch (const CLI::CallForHelp &help) {
      app.exit(help);
      return false;
    }
    setTexts();
    setBackend();
    check();
    return true;
  }

  Command command;

private:
  void addRun() {
    app.add_option("plan", options.planPath, "the plan, a JSON file")
        ->required();
    app.add_option("--nproc", command.ranks,
                   "start this many ranks here; it must be the plan's world "
                   "size, which is the default. Without it, a rank that "
                   "torchrun, srun or mpirun started joins the others")
        ->check(wholeNumber(1, kMaxCount));
    app.add_option("--steps,--max-steps", options.steps,
                   "training steps in all, including those before a resume")
        ->capture_default_str()
        ->check(wholeNumber(0, kMaxCount));
  }

  void addData() {
    data =
        app.add_option("--data", options.data.sources,
                       "[WEIGHT:]PATH[:DTYPE]: a safetensors file with one "
                       "tensor per input, samples in dim 0; a flat file of "
                       "tokens, of DTYPE or with llm.c's header; or the prefix "
                       "of Megatron-LM's .bin and .idx. May be given several "
                       "times: one after another, or mixed by WEIGHT")
            ->expected(1)
            ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    app.add_option("--shuffle-seed", options.data.shuffleSeed,
                   "shuffle the samples of --data anew in each epoch, with "
                   "this seed; by default they come in order")
        ->needs(data)
        ->check(wholeNumber(0, kMaxSeed));
    app.add_option("--token-inputs", options.data.tokenInputs,
                   "NAME[+SHIFT],...: inputs that get the tokens of a sample, "
                   "SHIFT tokens later; by default the plan's integer inputs, "
                   "the first with shift 0, the second with 1")
        ->needs(data)
        ->allow_extra_args(false)
        ->delimiter(',');
    app.add_option("--documents", documents,
                   "cross: samples of tokens may cross document boundaries; "
                   "within: each sample lies within one document")
        ->needs(data)
        ->capture_default_str()
        ->check(CLI::IsMember({"cross", "within"}));
    app.add_flag("--synthetic", synthetic,
                 "train on random inputs; the default")
        ->excludes(data);
    app.add_option(
           "--seed", options.seed,
           "seed of every rank's random generator, and of synthetic data")
        ->capture_default_str()
        ->check(wholeNumber(0, kMaxSeed));
    app.add_option("--init-seed", options.initSeed,
                   "seed of the model's own initialisation, which a model "
                   "captured on meta has; by default the value of --seed")
        ->check(wholeNumber(0, kMaxSeed));
  }

  void addReports() {
    app.add_option("--metrics", options.metricsPath,
                   "write one JSON object a step to this file");
    app.add_option(
        "--tensorboard", options.tensorboardFolder,
        "write the scalars of each step, under torchtitan's names, to "
        "a TensorBoard file in this folder");
    app.add_option(
           "--peak-flops", options.peakFlops,
           "peak FLOP/s of a rank's device in the model's dtype; MFU is "
           "the fraction of it that the model needs")
        ->check(kRate);
    app.add_flag("--halt-on-nonfinite", options.haltsOnNotFinite,
                 "fail if a loss, or a norm or value of the gradients, is not "
                 "finite, before anything is saved; without this flag there is "
                 "a warning");
    app.add_flag_callback(
        "--no-kernels", [] { setRunsKernelCode(false); },
        "run no code of the plan's kernels: their calls run one by "
        "one, with the same bits");
    app.add_option("--profile", options.profilePath,
                   "measure every instruction and write its time in seconds "
                   "to this file: the mean over ranks of medians over the "
                   "steps after the first two");
    app.add_option(
        "--trace", options.tracePath,
        "write the start and end times of each instruction of the last "
        "step to this file, for Perfetto and fsdp-opt --measured");
  }

  void addWeights() {
    auto *weights =
        app.add_option("--weights", options.weightsPath,
                       "initial weights instead of the plan's: a safetensors "
                       "file, or a Hugging Face index of several, or a "
                       "folder with one index");
    app.add_option(
           "--weights-hash", options.weightsHash,
           "the hash that the file of --weights must have: xxh3: followed "
           "by 32 hex digits")
        ->needs(weights);
    app.add_option(
           "--data-hash", options.dataHash,
           "the hash that the one file of --data must have: xxh3: followed "
           "by 32 hex digits")
        ->needs(data);
    app.add_option("--save-weights", options.outWeightsPath,
                   "write the final weights to this safetensors file");
    app.add_option("--allow-plugin", options.allowedPlugin,
                   "allow the code of this library, the plug-in that is the "
                   "plan's optimizer, to run");
    app.add_option("--load", options.operatorLibraries,
                   "load this library, which registers operators "
                   "(TORCH_LIBRARY), and let the plan call them; may be given "
                   "several times")
        ->expected(1)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  }

  void addExecution() {
    // More do not help, and LibTorch does not cope with just any number.
    uint64_t maxThreads =
        std::max<uint64_t>(256, std::thread::hardware_concurrency());
    app.add_option("--threads", options.threads, "threads per rank")
        ->capture_default_str()
        ->check(wholeNumber(1, maxThreads));
    app.add_option(
           "--device", options.device,
           "cpu; cuda: the GPU whose number is the rank's number on its "
           "host; cuda:N")
        ->capture_default_str();
    app.add_flag("--any-device", options.anyDevice,
                 "run a plan that was captured for another device");
    app.add_option(
           "--comm", comm,
           "shm: ranks share the memory of one host; gloo: each has its "
           "own memory, also on several hosts under torchrun; nccl: on "
           "GPUs. By default shm on the CPU, nccl on GPUs")
        ->check(CLI::IsMember(kBackends));
    app.add_flag("--cuda-graphs", options.graphs,
                 "with --device cuda: capture a step once, and replay it");
    app.add_option(
           "--streams", streams,
           "serial: one thread executes all streams of a rank; threads: "
           "one thread per stream")
        ->capture_default_str()
        ->check(CLI::IsMember({"serial", "threads"}));
  }

  void addEvaluation() {
    auto *evalEvery =
        app.add_option(
               "--eval-every", options.evalEvery,
               "compute the loss in eval mode each time this many steps are "
               "done")
            ->check(wholeNumber(1, kMaxCount));
    auto *evalData =
        app.add_option("--eval-data", options.evalSources,
                       "PATH[:DTYPE] as for --data, for evaluations; may be "
                       "given several times")
            ->needs(evalEvery)
            ->expected(1)
            ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    app.add_option("--eval-split", options.data.evalSplit,
                   "evaluate on the last part of each source of --data, this "
                   "fraction of its tokens, documents or samples, and do not "
                   "train on it")
        ->needs(data)
        ->excludes(evalData);
    app.add_option("--eval-batches", options.evalBatches,
                   "batches per rank in each evaluation; by default as many "
                   "as the data fills, at least one")
        ->needs(evalEvery)
        ->check(wholeNumber(1, kMaxCount));
  }

  void addLimits() {
    app.add_flag(
        "--dry-run", command.dryRuns,
        "check everything that the run reads and where it writes, print "
        "what it would do, and start no rank");
    app.add_option("--deadline", deadline,
                   "seconds that a rank waits for others, none of which makes "
                   "progress. By default 300 until a step is done, then 120 or "
                   "the time of 20 steps, whichever is longer")
        ->check(kDuration);
    app.add_option("--time-limit", timeLimit,
                   "stop as on TERM, early enough to be done this long after "
                   "the start: seconds, or HH:MM:SS")
        ->check(kDuration);
  }

  void addCheckpoints() {
    auto *checkpoint =
        app.add_option("--checkpoint", options.checkpointPath,
                       "save checkpoints to this folder, as step-N after N "
                       "steps: after the last step, and as --checkpoint-every "
                       "says");
    app.add_option("--checkpoint-every", options.checkpointEvery,
                   "steps from one checkpoint to the next")
        ->needs(checkpoint)
        ->check(wholeNumber(1, kMaxCount));
    app.add_option(
           "--keep", options.keep,
           "how many checkpoints to keep, the newest ones, at least two; "
           "by default all")
        ->needs(checkpoint)
        ->check(wholeNumber(2, kMaxCount));
    app.add_flag("--checkpoint-async", options.checkpointAsync,
                 "write checkpoints while the next steps run, from copies of "
                 "the state")
        ->needs(checkpoint);
    app.add_option(
        "--resume", options.resume,
        "resume from this checkpoint, a folder; auto: from the newest "
        "valid one in --checkpoint, or from the beginning if there is "
        "none");
  }

  /// What is not in the help.
  void addTesting() {
    app.add_option("--max-stream-delay", maxStreamDelay,
                   "longest delay before each instruction, in microseconds, "
                   "for testing")
        ->group("")
        ->check(wholeNumber(0, kMaxCount));
    app.add_option("--inject-fault", fault,
                   "rank:step:instruction:kill|throw, for testing")
        ->group("");
    app.add_option("--checkpoint-fault", saveFault,
                   "point:rank:step:times:signal, for testing")
        ->group("");
    app.add_option("--checkpoint-piece", options.checkpointPiece,
                   "bytes of one write, a multiple of 4096, for testing")
        ->group("");
    app.add_option("--checkpoint-patience", patience,
                   "seconds that ranks wait for each other's part of a "
                   "checkpoint, for testing")
        ->group("")
        ->check(wholeNumber(1, 86400));
  }

  void setTexts() {
    if (documents == "within")
      options.data.documents = Documents::Within;
    if (streams == "threads")
      options.maxStreamDelay = maxStreamDelay;
    if (std::optional<double> seconds = parseDuration(deadline))
      options.deadline = std::chrono::milliseconds(int64_t(*seconds * 1000));
    options.timeLimit = parseDuration(timeLimit);
    if (!fault.empty())
      options.fault = parseFault(fault);
    if (!saveFault.empty())
      options.saveFault = parseSaveFault(saveFault);
    options.checkpointPatience = std::chrono::seconds(patience);
  }

  void setBackend() {
    bool onGpu = isGpu(options.device);
    options.backend = !comm.empty() ? kBackends.at(comm)
                      : onGpu       ? Backend::Nccl
                                    : Backend::Shm;
    if (onGpu != (options.backend == Backend::Nccl))
      throw InputError("--comm: with --device " + options.device +
                       (onGpu ? " expected nccl" : " expected shm or gloo"));
  }

  /// What no validator of a single option can see.
  void check() const {
    bool onGpu = isGpu(options.device);
    bool measures = !options.profilePath.empty() || !options.tracePath.empty();
    if (!options.profilePath.empty() && !options.tracePath.empty())
      throw InputError("--trace: expected no --profile, which waits for the "
                       "device at every instruction");
    if (options.graphs && (!onGpu || measures))
      throw InputError("--cuda-graphs: expected --device cuda, no --profile "
                       "and no --trace");
    if (onGpu && options.maxStreamDelay)
      throw InputError("--streams: expected serial with --device cuda, which "
                       "has streams of its own, got threads");
    if (options.checkpointPiece == 0 || options.checkpointPiece % 4096 != 0)
      throw InputError("--checkpoint-piece: expected a multiple of 4096");
    if (options.resume == "auto" && options.checkpointPath.empty())
      throw InputError("--resume: expected --checkpoint with auto");
  }

  CLI::App app{"Trains a model by executing a plan made by fsdp-opt.\n"
               "Exit status: 0 success, 1 the run failed, 2 bad input, 143 it "
               "stopped after a step on TERM, INT or --time-limit, 130 it was "
               "asked to stop twice and stopped at once."};
  RunOptions &options = command.options;
  CLI::Option *data = nullptr;
  bool synthetic = false;
  std::string documents = "cross";
  std::string comm, streams = "serial";
  std::string deadline, timeLimit, fault, saveFault;
  int64_t maxStreamDelay = 0;
  int64_t patience = kChannelPatience.count();
};

} // namespace

std::optional<Command> fsdp::runtime::parseCommandLine(int argc, char **argv) {
  Parser parser;
  if (!parser.parse(argc, argv))
    return std::nullopt;
  return std::move(parser.command);
}
