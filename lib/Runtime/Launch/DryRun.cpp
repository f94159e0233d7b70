//===- DryRun.cpp - what a run would do -----------------------------------===//
#include "fsdp/Runtime/Launch/DryRun.h"
#include "fsdp/Plan/Memory.h"
#include "fsdp/Plan/OperatorWork.h"
#include "fsdp/Runtime/Checkpoint/CheckpointFolder.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Launch/Checkpointer.h"
#include "fsdp/Runtime/Launch/Launcher.h"
#include "fsdp/Runtime/Launch/Reporter.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <vector>

#include <sys/statvfs.h>
#include <unistd.h>

namespace fsdp::runtime {

namespace {

void print(const char *what, const std::string &text) {
  std::printf("%-16s %s\n", what, text.c_str());
}

std::string size(int64_t bytes) {
  const char *units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  auto value = double(bytes);
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(units); ++unit)
    value /= 1024;
  char text[64];
  std::snprintf(text, sizeof(text), unit ? "%.2f %s" : "%.0f %s", value,
                units[unit]);
  return text;
}

/// The nearest existing folder of a path.
std::string folderOf(const std::string &path) {
  std::filesystem::path folder = std::filesystem::absolute(path).parent_path();
  while (!std::filesystem::exists(folder) && folder.has_relative_path())
    folder = folder.parent_path();
  return folder.string();
}

/// Throws InputError if a file in an existing folder, or a folder anywhere,
/// cannot be created or changed.
void checkWritable(const std::string &path, bool isFolder) {
  std::string place = path;
  if (!std::filesystem::exists(path))
    place = isFolder ? folderOf(path)
                     : std::filesystem::absolute(path).parent_path().string();
  if (access(place.c_str(), W_OK) != 0)
    throw InputError(path + ": cannot write: " + std::strerror(errno));
}

/// What is free where `path` would be; throws InputError if that is too little.
std::string checkSpace(const std::string &path, int64_t bytes) {
  struct statvfs info{};
  if (statvfs(folderOf(path).c_str(), &info) != 0)
    throw InputError(
        path + ": cannot determine the free space: " + std::strerror(errno));
  auto available = int64_t(info.f_bavail) * int64_t(info.f_frsize);
  if (available < bytes)
    throw InputError(path + ": expected " + std::to_string(bytes) +
                     " bytes of free space, got " + std::to_string(available));
  return size(bytes) + ", of " + size(available) + " that are free";
}

int64_t weightBytes(const plan::Plan &plan) {
  int64_t bytes = 0;
  for (const plan::Param &param : plan.params)
    bytes += param.spec.numBytes() * int64_t(1 + param.aliases.size());
  for (const plan::Buffer &buffer : plan.buffers)
    bytes += buffer.persistent ? buffer.spec.numBytes() : 0;
  return bytes;
}

void printPlan(const plan::Plan &plan, const RunOptions &options) {
  int64_t elements = 0;
  for (const plan::Param &param : plan.params)
    elements += param.spec.numElements();
  print("plan", options.planPath + ": " +
                    std::to_string(plan.instructions.size()) +
                    " instructions, " + std::to_string(plan.params.size()) +
                    " parameters of " + std::to_string(elements) + " elements");
  const char *transport = options.backend == Backend::Shm    ? "shm"
                          : options.backend == Backend::Gloo ? "gloo"
                                                             : "nccl";
  print("ranks", std::to_string(plan.worldSize) + " on " + options.device +
                     " by " + transport);
  auto model = options.backend == Backend::Shm ? plan::MemoryModel::SharedHost
                                               : plan::MemoryModel::Device;
  plan::BytesByUse kept = plan::staticBytes(plan, model);
  std::string parts =
      plan.arena ? "; arena " + size(plan.arena->bytes) : std::string();
  for (size_t use = 0; use < kept.size(); ++use)
    if (kept[use] > 0)
      parts += ", " + std::string(plan::memoryUseName(plan::MemoryUse(use))) +
               " " + size(kept[use]);
  print("memory a rank", size(plan::peakBytes(plan, model)) + parts);
}

void printSteps(const RunFiles &files, const RunOptions &options) {
  const plan::Plan &plan = files.plan;
  print("steps", std::to_string(options.steps));
  int64_t tokens =
      tokensPerStep(plan) * plan.accumulationSteps * plan.worldSize;
  print("tokens a step", std::to_string(tokens));
  if (double flops = plan::modelWork(plan).flops; flops > 0) {
    char text[64];
    std::snprintf(text, sizeof(text), "%.4g of the model, on each rank", flops);
    print("flops a step", text);
  }
  std::string data = files.data->describe();
  if (int64_t samples = files.data->epoch()) {
    double perStep =
        double(samplesPerMicrobatch(plan)) * double(plan.accumulationSteps);
    char text[64];
    std::snprintf(text, sizeof(text), "; %.4g steps an epoch",
                  double(samples) / perStep);
    data += text;
  }
  print("data", data);
}

/// What the run goes on from; null: nothing.
std::unique_ptr<NativeCheckpoint> chooseCheckpoint(const RunOptions &options) {
  if (options.resume.empty())
    return nullptr;
  if (options.resume != "auto") {
    auto checkpoint = std::make_unique<NativeCheckpoint>(options.resume);
    checkpoint->verifyAll();
    return checkpoint;
  }
  CheckpointFolder folder(options.checkpointPath);
  auto newest =
      openNewest(folder, [](const std::string &why) { print("skips", why); });
  if (size_t count = folder.steps().size(); !newest && count > 0)
    throw InputError(options.checkpointPath + ": none of its " +
                     std::to_string(count) + " checkpoints is valid");
  return newest;
}

/// Parameters, buffers and the optimizer's state of these, roughly.
int64_t checkpointBytes(const plan::Plan &plan) {
  int64_t bytes = 0;
  plan::BytesByUse kept =
      plan::staticBytes(plan, plan::MemoryModel::SharedHost);
  for (plan::MemoryUse use :
       {plan::MemoryUse::ParamShard, plan::MemoryUse::OptimizerState})
    bytes += kept[size_t(use)] * plan.shards();
  for (const plan::Buffer &buffer : plan.buffers)
    bytes += buffer.spec.numBytes();
  return bytes;
}

void printCheckpoints(const RunFiles &files, const RunOptions &options) {
  if (!options.hasCheckpoints())
    return;
  std::unique_ptr<NativeCheckpoint> chosen = chooseCheckpoint(options);
  checkOwn(CheckpointFolder(options.checkpointPath), options, chosen.get());
  if (chosen && !options.metricsPath.empty())
    (void)bytesOfSteps(options.metricsPath, chosen->manifest().state.step);
  std::string differences;
  if (chosen)
    differences =
        compareRuns(*chosen, files, options, files.data->fingerprint());
  print("begins", chosen ? chosen->path() + ", after step " +
                               std::to_string(chosen->manifest().state.step)
                         : std::string("at the beginning"));
  if (!differences.empty())
    print("differs", differences);
  if (options.checkpointPath.empty())
    return;
  checkWritable(options.checkpointPath, /*isFolder=*/true);
  print("checkpoints",
        options.checkpointPath + ", each about " +
            checkSpace(options.checkpointPath, checkpointBytes(files.plan)));
}

void printOutputs(const RunFiles &files, const RunOptions &options) {
  if (files.resumes)
    print("weights", "those of the checkpoint");
  else
    print("weights",
          files.weights
              ? files.weights->path()
              : "initialised, seed " +
                    std::to_string(options.initSeed.value_or(options.seed)));
  if (!options.metricsPath.empty()) {
    checkWritable(options.metricsPath, /*isFolder=*/false);
    print("writes", options.metricsPath);
  }
  if (!options.tensorboardFolder.empty()) {
    checkWritable(options.tensorboardFolder, /*isFolder=*/true);
    print("writes", options.tensorboardFolder);
  }
  for (const std::string &path : {options.profilePath, options.tracePath})
    if (!path.empty())
      print("writes", path);
  if (!options.outWeightsPath.empty())
    print("writes",
          options.outWeightsPath + ": " +
              checkSpace(options.outWeightsPath, weightBytes(files.plan)));
}

} // namespace

void dryRun(const RunOptions &options, std::optional<int64_t> ranks) {
  RunFiles files(options, /*first=*/true);
  files.checkHashes(options);
  checkRanks(files, options, ranks);
  printPlan(files.plan, options);
  printSteps(files, options);
  printOutputs(files, options);
  printCheckpoints(files, options);
}

} // namespace fsdp::runtime
