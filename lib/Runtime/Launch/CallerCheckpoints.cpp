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

/// RunState::run of a checkpoint; empty if that is not known.
std::string runOf(const std::string &path) {
  try {
    return NativeCheckpoint(path).manifest().state.run;
  } catch (const InputError &) {
    return "";
  }
}

/// Whether it is the name of a checkpoint, roughly.
bool isStepName(const std::string &name) {
  constexpr std::string_view kPrefix = "step-";
  return name.starts_with(kPrefix) && name.size() > kPrefix.size() &&
         name.find_first_not_of("0123456789", kPrefix.size()) ==
             std::string::npos;
}

/// Of a path that is no checkpoint and contains none. Throws InputError if it
/// is meant as one: a loop that begins anew because of a mistyped path loses
/// what was trained.
void checkNoneMeant(const fs::path &path) {
  std::error_code error;
  bool isThere = fs::exists(path, error);
  if (isStepName(path.filename().string()))
    throw InputError(path.string() + ": expected a checkpoint, got " +
                     (isThere ? std::string("a folder without ") + kManifestName
                              : "no such folder"));
  for (const fs::directory_entry &entry : fs::directory_iterator(path, error)) {
    std::string name = entry.path().filename().string();
    if (name == ".metadata" || name.ends_with(".distcp"))
      throw InputError(path.string() +
                       ": expected a folder of checkpoints, got a checkpoint "
                       "of torch.distributed.checkpoint; `fsdp-checkpoint "
                       "convert` converts it");
  }
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
    checkFolder(path, state.step);
    if (run.empty())
      run = newAttempt();
  });
  // Which this process has now: whatever comes there is its own.
  newest[path] = INT64_MAX;
  SaveRequest request;
  request.state = state;
  request.state.run = run; // rank 0's counts
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

void CallerCheckpoints::checkFolder(const std::string &path, int64_t step) {
  const CheckpointFolder &folder = folderAt(path);
  auto after = newest.find(path);
  for (int64_t other : folder.steps()) {
    // The run may have saved to several folders before it was continued.
    bool isOurs = after != newest.end()
                      ? other <= after->second
                      : other <= step && !run.empty() &&
                            runOf(folder.pathOf(other)) == run;
    if (!isOurs)
      throw InputError(folder.pathOf(other) +
                       ": a checkpoint of another run; expected to load the "
                       "newest of its folder before, or another folder");
    if (other == step && !folder.isDamaged(other))
      throw InputError(folder.pathOf(other) +
                       ": already exists; expected another step");
  }
}

bool CallerCheckpoints::open(const std::string &path,
                             std::vector<std::string> &skipped) {
  chosen.reset();
  json decision = onRankZero(*channel, [&](json &made) {
    made["one"] = fs::exists(fs::path(path) / kManifestName);
    if (made["one"].get<bool>())
      return;
    std::vector<int64_t> steps = folderAt(path).steps();
    if (steps.empty())
      checkNoneMeant(path);
    made["steps"] = std::move(steps);
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
  if (chosen) {
    // Until goOn: what has been read in part belongs to no run.
    newest.clear();
    run.clear();
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

void CallerCheckpoints::goOn() {
  newest[folderOfChosen] = lastOfChosen;
  run = opened().manifest().state.run;
}

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
