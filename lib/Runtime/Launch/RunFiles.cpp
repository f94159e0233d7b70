//===- RunFiles.cpp - what a run reads, checked before it begins ----------===//
#include "fsdp/Runtime/Launch/RunFiles.h"
#include "fsdp/Plan/DeviceBuffers.h"
#include "fsdp/Runtime/Checkpoint/CheckpointFolder.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Execution/OpenPlan.h"
#include "fsdp/Runtime/Execution/Profiler.h"
#include "fsdp/Runtime/Execution/StepTrace.h"
#include "fsdp/Runtime/Operators/KernelTable.h"
#include "fsdp/Runtime/Operators/OperatorLibraries.h"
#include "fsdp/Support/Outputs.h"

#include <algorithm>
#include <filesystem>

#include <sys/stat.h>
#include <unistd.h>

namespace fsdp::runtime {

namespace {

/// Of an option that names a file for what steps after a warm-up measure.
void checkMeasuring(const char *option, const std::string &path, int64_t warmup,
                    int64_t begin, int64_t steps) {
  if (!path.empty() && steps <= begin + warmup)
    throw InputError(std::string(option) + ": expected --steps of at least " +
                     std::to_string(begin + warmup + 1) + ", got " +
                     std::to_string(steps));
}

/// Of what checkpoints contain.
void checkNames(const plan::Plan &plan, const std::string &path) {
  auto check = [&](const std::string &name) {
    if (std::string why = whyReserved(name); !why.empty())
      throw InputError(path + ": " + why);
  };
  for (const plan::Param &param : plan.params) {
    check(param.name);
    std::for_each(param.aliases.begin(), param.aliases.end(), check);
  }
  for (const plan::Buffer &buffer : plan.buffers)
    check(buffer.name);
}

} // namespace

static plan::Plan openPlan(const RunOptions &options) {
  loadOperators(options.operatorLibraries);
  plan::Plan plan = openPlan(options.planPath, options.allowedPlugin);
  if (!options.anyDevice)
    checkDevice(plan, options.planPath, isGpu(options.device));
  return plan;
}

/// Of the weights that the plan names; empty: none.
static std::string capturedPath(const plan::Plan &plan,
                                const RunOptions &options) {
  if (plan.weights.path.empty())
    return "";
  std::filesystem::path path = options.planPath;
  return (path.parent_path() / plan.weights.path).string();
}

/// Throws InputError for an output in a checkpoint that the run may read.
static void checkOutside(const NamedFile &output, const RunOptions &options) {
  std::error_code error;
  auto folder = std::filesystem::absolute(output.path, error).parent_path();
  auto check = [&](const char *option, const std::filesystem::path &folder,
                   const std::string &path) {
    if (!path.empty() && std::filesystem::equivalent(folder, path, error))
      throw InputError(output.name + " and " + option +
                       ": expected a file that is in no checkpoint, got " +
                       output.path);
  };
  check("--resume", folder, options.resume);
  if (folder.filename().string().starts_with("step-"))
    check("--checkpoint", folder.parent_path(), options.checkpointPath);
}

void checkMeasuring(const RunOptions &options, int64_t begin) {
  checkMeasuring("--profile", options.profilePath, Profiler::kWarmup, begin,
                 options.steps);
  checkMeasuring("--trace", options.tracePath, StepTrace::kWarmup, begin,
                 options.steps);
}

std::string hashOfPlan(plan::Plan plan) {
  plan.optimizer.library.clear();
  for (plan::Optimizer &group : plan.paramGroups)
    group.library.clear();
  return hashBytes(plan::printPlan(plan));
}

RunFiles::RunFiles(const RunOptions &options, bool first)
    : plan(openPlan(options)) {
  if (plan.optimizer.isExternal())
    throw InputError(options.planPath +
                     ": the optimizer is \"external\", which the program that "
                     "hosts the runtime updates with; fsdp-run has none");
  if (options.hasCheckpoints()) {
    planHash = hashOfPlan(plan);
    checkNames(plan, options.planPath);
  }
  if (options.backend != Backend::Shm)
    plan::addDeviceBuffers(plan);
  if (options.initSeed && plan.init.empty())
    throw InputError(options.planPath +
                     ": --init-seed: the plan has no initialisation; capture "
                     "the model on meta");
  checkMeasuring(options, 0);
  if (!options.profilePath.empty() && options.maxStreamDelay)
    throw InputError("--profile: expected --streams serial, got threads");
  resumes = options.resume == "auto"
                ? !CheckpointFolder(options.checkpointPath).steps().empty()
                : !options.resume.empty();
  if (!resumes)
    openWeights(options);
  openData(options);
  openEvaluation(options);
  if (!first)
    return;
  if (std::string other = otherTorch(plan, options.planPath); !other.empty())
    std::fprintf(stderr, "fsdp-run: warning: %s\n", other.c_str());
  if (!isGpu(options.device))
    warnOfKernelCode(plan, options.planPath, kernelTarget());
  checkOutputs(options);
  openOutputs(options);
}

void warnOfKernelCode(const plan::Plan &plan, const std::string &path,
                      const std::string &target) {
  std::string why = whyNoKernelCode(plan, target);
  if (runsKernelCode() && !why.empty())
    std::fprintf(stderr,
                 "fsdp-run: warning: %s: the code of its kernels is not run, "
                 "but their calls: %s\n",
                 path.c_str(), why.c_str());
}

void RunFiles::checkOutputs(const RunOptions &options) const {
  std::vector<NamedFile> inputs = {{"the plan", options.planPath}};
  auto add = [&](const char *name, const std::vector<std::string> &paths) {
    for (const std::string &path : paths)
      if (!path.empty())
        inputs.push_back({name, path});
  };
  add("the plan's weights", {capturedPath(plan, options)});
  add("--weights", {options.weightsPath});
  if (weights && !options.weightsPath.empty())
    add("--weights", weights->paths());
  auto addData = [&](const char *name, const DataSource *source) {
    if (const FileData *files = source ? source->asFiles() : nullptr)
      for (const auto &samples : files->sources())
        add(name, samples->paths());
  };
  addData("--data", data.get());
  addData("--eval-data", evalData.get());
  add("--allow-plugin", {options.allowedPlugin});
  add("--load", options.operatorLibraries);
  std::vector<NamedFile> outputs;
  for (const NamedFile &file : {NamedFile{"--metrics", options.metricsPath},
                                {"--save-weights", options.outWeightsPath},
                                {"--profile", options.profilePath},
                                {"--trace", options.tracePath}})
    if (!file.path.empty())
      outputs.push_back(file);
  if (std::string error = fsdp::checkOutputs(outputs, inputs); !error.empty())
    throw InputError(error);
  for (const NamedFile &file : outputs)
    checkOutside(file, options);
}

void RunFiles::openOutputs(const RunOptions &options) {
  auto open = [](std::unique_ptr<OutputFile> &file, const std::string &path) {
    if (!path.empty())
      file = std::make_unique<OutputFile>(path);
  };
  open(outWeights, options.outWeightsPath);
  open(profile, options.profilePath);
  open(trace, options.tracePath);
}

namespace {

/// Of a file that was given with the hash that it must have.
void checkGivenHash(const std::string &path, const std::string &want,
                    const std::string &got) {
  if (!want.empty() && got != want)
    throw InputError(path + ": expected a file with hash " + want + ", got " +
                     (got.empty() ? "an index, which has none" : got));
}

} // namespace

void RunFiles::checkHashes(const RunOptions &options) const {
  const FileData *read = data->asFiles();
  if (read && !options.dataHash.empty())
    checkGivenHash(options.data.sources[0], options.dataHash,
                   read->sources()[0]->hash());
  if (weights && options.weightsPath.empty()) {
    std::string got = plan.weights.hash.empty() ? "" : weights->hash();
    if (got != plan.weights.hash)
      throw InputError(weights->path() + ": expected weights with hash " +
                       plan.weights.hash + ", got " + got +
                       "; the file changed since the model was captured "
                       "(--weights accepts another file)");
  } else if (weights) {
    if (!options.weightsHash.empty())
      checkGivenHash(options.weightsPath, options.weightsHash, weights->hash());
    weights->checkHash();
    if (capturedWeights)
      capturedWeights->checkHash();
  }
  for (const auto *source : {&data, &evalData})
    if (const FileData *files = *source ? (*source)->asFiles() : nullptr)
      for (const auto &samples : files->sources())
        samples->checkHash();
}

RunFiles::Reading RunFiles::hashed() const {
  std::string text;
  int64_t bytes = 0;
  auto add = [&](const std::vector<std::string> &paths) {
    for (const std::string &path : paths) {
      struct stat info{};
      // One that is gone is nobody else's.
      text += stat(path.c_str(), &info) == 0
                  ? std::to_string(info.st_dev) + ":" +
                        std::to_string(info.st_ino) + " "
                  : path + " of " + std::to_string(getpid()) + " ";
      bytes += info.st_size;
    }
  };
  for (const auto *read : {&weights, &capturedWeights})
    if (*read)
      add((*read)->paths());
  for (const auto *source : {&data, &evalData})
    if (const FileData *files = *source ? (*source)->asFiles() : nullptr)
      for (const auto &samples : files->sources())
        add(samples->paths());
  return {hashBytes(text), bytes};
}

void RunFiles::openData(const RunOptions &options) {
  const std::vector<std::string> &sources = options.data.sources;
  if (sources.empty()) {
    data = makeSyntheticData(plan, options.seed);
    return;
  }
  if (!options.dataHash.empty() && sources.size() > 1)
    throw InputError("--data-hash: expected one source, got " +
                     std::to_string(sources.size()));
  TrainingData opened = runtime::openData(plan, options.data);
  data = std::move(opened.training);
  evalData = std::move(opened.heldOut);
}

void RunFiles::openWeights(const RunOptions &options) {
  std::string captured = capturedPath(plan, options);
  if (!options.weightsPath.empty())
    weights.emplace(options.weightsPath);
  else if (!captured.empty())
    weights.emplace(captured);
  else if (plan.init.empty())
    throw InputError(options.planPath +
                     ": the plan names no weights (the model was captured "
                     "without any); give some with --weights");
  initialises = !weights;
  if (!weights)
    return;
  weights->check(plan);
  if (options.weightsPath.empty())
    return;
  for (const plan::Buffer &buffer : plan.buffers) {
    if (weights->has(buffer) || initialises || capturedWeights)
      continue;
    if (!plan.init.empty()) {
      initialises = true;
    } else if (!captured.empty()) {
      capturedWeights.emplace(captured);
      capturedWeights->check(plan);
    } else {
      throw InputError(weights->path() + ": no tensor for buffer \"" +
                       buffer.name + "\"");
    }
  }
}

void RunFiles::openEvaluation(const RunOptions &options) {
  if (options.evalEvery == 0) {
    evalData.reset();
    return;
  }
  if (plan.evaluation.empty())
    throw InputError(options.planPath +
                     ": --eval-every: the plan has no evaluation; capture the "
                     "model with --evaluation (capture(..., evaluation=True))");
  if (data->asFiles() && !evalData && options.evalSources.empty())
    throw InputError("--eval-every: expected --eval-data or --eval-split where "
                     "--data is given");
  if (!options.evalSources.empty())
    evalData = openEvalData(plan, options.evalSources, options.data);
  else if (!evalData)
    // Another seed than that of the training data.
    evalData = makeSyntheticData(plan, ~options.seed);
  evalBatches = options.evalBatches > 0
                    ? options.evalBatches
                    : std::max<int64_t>(1, evalData->epoch() /
                                               samplesPerMicrobatch(plan));
}

} // namespace fsdp::runtime
