//===- CallerCheckpoints.cpp - checkpoints of a caller's own tensors ------===//
#include "fsdp/Runtime/Launch/CallerCheckpoints.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Launch/OpenTogether.h"
#include "fsdp/Runtime/Launch/StoreChannel.h"
#include "fsdp/Runtime/Memory/Layout.h"

#include <nlohmann/json.hpp>

#include <filesystem>
#include <utility>

namespace fsdp::runtime {

using nlohmann::json;
namespace fs = std::filesystem;

namespace {

std::string print(const json &message) {
  return message.dump(-1, ' ', false, json::error_handler_t::replace);
}

/// Gives all ranks what rank 0 makes; or throws its error on all.
template <typename F> json onRankZero(Channel &channel, F make) {
  json decision = json::object();
  if (channel.rank() == 0)
    try {
      make(decision);
    } catch (const std::exception &error) {
      decision["error"] = error.what();
    }
  decision = json::parse(channel.broadcast(print(decision)));
  throwOnAll(channel, decision.value("error", ""));
  return decision;
}

ShardTensor shardOf(const CallerTensor &tensor) {
  plan::TensorSpec spec{tensor.shape, planType(tensor.data.scalar_type())};
  return {tensor.name,
          spec,
          {tensor.offsets, tensor.data.sizes().vec()},
          {static_cast<const std::byte *>(tensor.data.const_data_ptr()),
           tensor.data.nbytes()}};
}

} // namespace

CallerCheckpoints::CallerCheckpoints(Rendezvous &rendezvous)
    : channel(makeStoreChannel(rendezvous.connectStore(), rendezvous.rank(),
                               rendezvous.worldSize(), kChannelPatience,
                               [] { return false; })),
      progress(rendezvous.rank(), position, std::nullopt) {}

CheckpointFolder &CallerCheckpoints::folderAt(const std::string &path) {
  std::unique_ptr<CheckpointFolder> &folder = folders[path];
  if (!folder)
    folder = std::make_unique<CheckpointFolder>(path);
  return *folder;
}

std::string
CallerCheckpoints::save(const std::string &path, const RunState &state,
                        const std::map<std::string, std::string> &aliases,
                        const std::vector<CallerTensor> &chunks,
                        const std::vector<CallerTensor> &own, int64_t keep) {
  CheckpointFolder &folder = folderAt(path);
  onRankZero(*channel, [&](json &) {
    folder.open();
    auto after = newest.find(path);
    for (int64_t step : folder.steps()) {
      if (after == newest.end() || step > after->second)
        throw InputError(folder.pathOf(step) +
                         ": a checkpoint of another run; expected to load the "
                         "newest of its folder before, or another folder");
      if (step == state.step && !folder.isDamaged(step))
        throw InputError(folder.pathOf(step) +
                         ": already exists; expected another step");
    }
  });
  // Which this process has now: whatever comes there is its own.
  newest[path] = INT64_MAX;
  SaveRequest request;
  request.state = state;
  request.aliases = aliases;
  for (const CallerTensor &tensor : chunks)
    request.chunks.push_back(shardOf(tensor));
  for (const CallerTensor &tensor : own)
    request.own.push_back(shardOf(tensor));
  auto meet = [&] {
    // Rank 0, which may serve the store, stays until all have its last word.
    channel->gather("");
  };
  try {
    SaveResult result =
        saveCheckpoint(request, folder, keep, *channel, progress);
    meet();
    return result.warning;
  } catch (const SaveError &error) {
    meet();
    throw RunError(folder.pathOf(state.step) + " was not saved: rank " +
                   std::to_string(error.rank) + ": " + error.what());
  }
}

bool CallerCheckpoints::open(const std::string &path,
                             std::vector<std::string> &skipped) {
  chosen.reset();
  newest.clear();
  json decision = onRankZero(*channel, [&](json &made) {
    made["one"] = fs::exists(fs::path(path) / kManifestName);
    if (!made["one"].get<bool>())
      made["steps"] = folderAt(path).steps();
  });
  if (decision["one"].get<bool>()) {
    std::string error;
    chosen = openTogether(path, 0, *channel, progress, error);
    throwOnAll(*channel, error);
    folderOfChosen = fs::path(path).parent_path().string();
    lastOfChosen = chosen->manifest().state.step;
  } else {
    chosen = openNewestTogether(
        folderAt(path), decision["steps"].get<std::vector<int64_t>>(), *channel,
        progress, [&](const std::string &why) { skipped.push_back(why); });
    // Newer ones are not valid.
    folderOfChosen = path;
    lastOfChosen = INT64_MAX;
  }
  progress.end();
  channel->gather("");
  return bool(chosen);
}

const NativeCheckpoint &CallerCheckpoints::opened() const {
  if (!chosen)
    throw InputError("no checkpoint is open");
  return *chosen;
}

void CallerCheckpoints::goOn() { newest[folderOfChosen] = lastOfChosen; }

void CallerCheckpoints::checkTypes(const std::vector<CallerTensor> &tensors) {
  for (const CallerTensor &tensor : tensors)
    shardOf(tensor);
}

void CallerCheckpoints::check(const CallerTensor &tensor) const {
  const NativeCheckpoint &checkpoint = opened();
  std::string place = checkpoint.path() + ": ";
  if (!checkpoint.has(tensor.name))
    throw InputError(place + "no tensor \"" + tensor.name +
                     "\", which the model has");
  const plan::TensorSpec &saved = checkpoint.manifest().tensors.at(tensor.name);
  plan::TensorSpec want = shardOf(tensor).spec;
  if (saved != want)
    throw InputError(place + "tensor \"" + tensor.name + "\": expected " +
                     describe(want) + ", got " + describe(saved));
}

void CallerCheckpoints::read(const CallerTensor &to) const {
  check(to);
  if (to.data.numel() > 0)
    opened().read(to.name, shardOf(to).chunk,
                  {static_cast<std::byte *>(to.data.mutable_data_ptr()),
                   to.data.nbytes()});
}

} // namespace fsdp::runtime
