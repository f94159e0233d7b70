//===- OpenTogether.cpp - a checkpoint that all ranks go on from ----------===//
#include "fsdp/Runtime/Launch/OpenTogether.h"
#include "fsdp/Runtime/Error.h"

#include <ATen/Version.h>
#include <nlohmann/json.hpp>
#include <torch/version.h>

#include <filesystem>
#include <system_error>

namespace fsdp::runtime {

using nlohmann::json;

namespace {

/// Paths may have any bytes.
std::string print(const json &message) {
  return message.dump(-1, ' ', false, json::error_handler_t::replace);
}

} // namespace

std::unique_ptr<NativeCheckpoint> openTogether(const std::string &path,
                                               int64_t step, Channel &channel,
                                               Progress &progress,
                                               std::string &error) {
  std::unique_ptr<NativeCheckpoint> opened;
  json own = json::object();
  try {
    progress.begin(step);
    progress.reach(SavePoint::Choose);
    opened = std::make_unique<NativeCheckpoint>(path);
    own["hash"] = opened->hash();
    progress.begin(opened->manifest().state.step);
    progress.reach(SavePoint::Verify);
    size_t count = opened->manifest().files.size();
    for (auto file = size_t(channel.rank()); file < count;
         file += size_t(channel.worldSize()))
      opened->verify(file, [&] {
        progress.beat();
        channel.check();
      });
  } catch (const InputError &problem) {
    own["error"] = problem.what();
  }
  std::vector<std::string> texts = channel.gather(print(own));
  json verdict = json::object();
  for (size_t rank = 0; rank < texts.size() && !verdict.contains("error");
       ++rank) {
    json other = json::parse(texts[rank]);
    if (other.contains("error"))
      verdict["error"] = other["error"];
    else if (other["hash"] != own["hash"])
      verdict["error"] = path + ": rank " + std::to_string(rank) +
                         " sees another checkpoint there than rank 0";
  }
  verdict = json::parse(channel.broadcast(print(verdict)));
  error = verdict.value("error", "");
  return error.empty() ? std::move(opened) : nullptr;
}

std::unique_ptr<NativeCheckpoint>
openNewestTogether(CheckpointFolder &folder, const std::vector<int64_t> &steps,
                   Channel &channel, Progress &progress,
                   const std::function<void(const std::string &)> &skipped) {
  std::string path;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    std::string error;
    path = folder.pathOf(*step);
    if (auto opened = openTogether(path, *step, channel, progress, error))
      return opened;
    folder.setDamaged(*step);
    if (channel.rank() == 0)
      skipped(error);
  }
  if (!steps.empty())
    throwOnAll(channel,
               std::filesystem::path(path).parent_path().string() +
                   ": none of its " + std::to_string(steps.size()) +
                   " checkpoints is valid; expected one, or an empty folder to "
                   "start from");
  return nullptr;
}

void throwOnAll(const Channel &channel, const std::string &error) {
  if (error.empty())
    return;
  if (channel.rank() == 0)
    throw InputError(error);
  throw AbortedError(error);
}

std::map<std::string, std::string> environmentOfBits(bool isGpu,
                                                     int64_t threads) {
  return {{"torch", TORCH_VERSION},
          {"device", isGpu ? "cuda" : "cpu"},
          {"cpu_capability", at::get_cpu_capability()},
          {"threads", std::to_string(threads)}};
}

std::string compareRuns(const RunState &then, const RunState &now) {
  std::string differences;
  auto compare = [&](const std::string &what, const std::string &before,
                     const std::string &after) {
    if (before != after)
      differences += (differences.empty() ? "" : "; ") + what + " was " +
                     before + ", is " + after;
  };
  // A converted checkpoint says nothing of these.
  bool isKnown = then.worldSize > 0;
  if (isKnown)
    compare("the world size", std::to_string(then.worldSize),
            std::to_string(now.worldSize));
  if (then.worldSize == now.worldSize && !then.plan.empty() &&
      !now.plan.empty())
    compare("the plan", then.plan, now.plan);
  auto dataOf = [](const RunState &state) {
    return state.data.empty() ? "random" : state.data;
  };
  if (isKnown)
    compare("the data", dataOf(then), dataOf(now));
  for (const auto &[what, after] : now.environment) {
    auto before = then.environment.find(what);
    if (before != then.environment.end())
      compare(what, before->second, after);
  }
  return differences;
}

void checkOwn(const CheckpointFolder &folder, const std::string &path,
              const NativeCheckpoint *chosen, const std::string &expected) {
  // Of a checkpoint elsewhere nothing in this folder is.
  std::error_code error;
  bool isOurs =
      chosen && std::filesystem::equivalent(
                    std::filesystem::path(chosen->path()) / "..", path, error);
  int64_t after = isOurs ? chosen->manifest().state.step : -1;
  for (int64_t step : folder.steps())
    if (step > after)
      throw InputError(folder.pathOf(step) + ": a checkpoint of another run" +
                       (isOurs ? ", after step " + std::to_string(after) +
                                     " from which this run continues"
                               : "") +
                       "; expected " + expected);
}

} // namespace fsdp::runtime
