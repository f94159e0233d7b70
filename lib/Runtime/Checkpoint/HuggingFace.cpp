//===- HuggingFace.cpp - model folders of Hugging Face --------------------===//
#include "fsdp/Runtime/Checkpoint/HuggingFace.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Files/Files.h"
#include "fsdp/Runtime/Files/SafeTensors.h"
#include "fsdp/Runtime/Files/WeightFiles.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <system_error>

namespace fsdp::runtime {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kIndex = "model.safetensors.index.json",
                           kSingle = "model.safetensors",
                           kSuffix = ".safetensors";

/// The index or file that a path stands for; none if it is something else.
std::optional<std::string> entryOf(const std::string &path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    bool is = path.ends_with(kSuffix) || path.ends_with(".json");
    return is ? std::optional(path) : std::nullopt;
  }
  for (std::string_view file : {kIndex, kSingle})
    if (fs::path entry = fs::path(path) / file; fs::exists(entry, error))
      return entry.string();
  return std::nullopt;
}

/// Checks that the folder has no safetensors files but those that were opened.
void checkFolder(const std::string &folder, const WeightFiles &weights) {
  std::set<std::string> known;
  std::error_code error;
  for (const SafeTensors &file : weights.opened())
    known.insert(fs::weakly_canonical(file.path(), error).string());
  for (const fs::directory_entry &entry : fs::directory_iterator(folder, error))
    if (entry.path().extension() == kSuffix &&
        !known.contains(fs::weakly_canonical(entry.path(), error).string()))
      throw InputError(entry.path().string() +
                       ": a file of another checkpoint: nothing in " +
                       weights.path() + " refers to it");
  if (error)
    throw InputError(folder + ": cannot be read: " + error.message());
}

/// Whether a name belongs to a training run and not to a model
/// (docs/checkpoints.md).
bool isModels(std::string_view name) {
  for (std::string_view prefix :
       {"optimizer.", "lr_scheduler.", "train_state.", "dataloader.", "rank."})
    if (name.starts_with(prefix))
      return false;
  return true;
}

/// A tensor's elements in a row: where they are, or a copy.
class Whole {
public:
  explicit Whole(const SavedTensor &tensor) {
    Chunk box{std::vector<int64_t>(tensor.spec.shape.size(), 0),
              tensor.spec.shape};
    for (const ChunkData &chunk : tensor.chunks)
      if (chunk.chunk == box) {
        data = chunk.data;
        return;
      }
    auto bytes = size_t(tensor.spec.numBytes());
    copy = std::make_unique_for_overwrite<std::byte[]>(bytes);
    copyBox(tensor, box, {copy.get(), bytes});
    data = {copy.get(), bytes};
  }

  std::span<const std::byte> data;

private:
  std::unique_ptr<std::byte[]> copy;
};

bool areEqual(const SavedTensor &a, const SavedTensor &b) {
  if (a.spec != b.spec)
    return false;
  Whole first(a), second(b);
  return first.data.empty() ||
         std::memcmp(first.data.data(), second.data.data(),
                     first.data.size()) == 0;
}

std::string fileName(size_t index, size_t count) {
  std::array<char, 64> name{};
  std::snprintf(name.data(), name.size(), "model-%05zu-of-%05zu.safetensors",
                index + 1, count);
  return name.data();
}

} // namespace

bool isHuggingFace(const std::string &path) {
  return entryOf(path).has_value();
}

SavedState readHuggingFace(const std::string &path, const NameMap *map) {
  std::optional<std::string> entry = entryOf(path);
  if (!entry)
    throw InputError(path + ": expected a folder with " + std::string(kIndex) +
                     " or " + std::string(kSingle) + ", or a safetensors file");
  auto weights = std::make_shared<WeightFiles>(*entry);
  std::error_code error;
  if (fs::is_directory(path, error)) {
    weights->checkIndexIsWhole();
    checkFolder(path, *weights);
  }
  weights->checkHash();
  SavedState state;
  for (const SafeTensors &file : weights->opened())
    for (const auto &[theirs, tensor] : file.entries()) {
      std::vector<std::string> names = {theirs};
      if (map)
        names = map->ours(theirs);
      Chunk whole{std::vector<int64_t>(tensor.spec.shape.size(), 0),
                  tensor.spec.shape};
      for (const std::string &name : names)
        if (!state.tensors
                 .emplace(name,
                          SavedTensor{tensor.spec,
                                      {{whole, tensor.data, file.path()}}})
                 .second)
          throw InputError(file.path() + ": tensor \"" + name +
                           "\" appears twice");
    }
  state.memory.push_back(std::move(weights));
  return state;
}

std::vector<std::string> writeHuggingFace(const std::string &folder,
                                          const SavedState &state,
                                          const NameMap *map,
                                          int64_t fileBytes) {
  std::vector<std::string> leftOut;
  std::map<std::string, std::pair<std::string, const SavedTensor *>> tensors;
  for (const auto &[name, tensor] : state.tensors) {
    if (!isModels(name)) {
      leftOut.push_back(name);
      continue;
    }
    std::string theirs = map ? map->theirs(name) : name;
    auto [it, added] = tensors.emplace(theirs, std::pair(name, &tensor));
    if (!added && !areEqual(*it->second.second, tensor))
      throw InputError(folder + ": expected equal tensors for \"" + theirs +
                       "\", got \"" + it->second.first + "\" and \"" + name +
                       "\"");
  }
  for (const auto &[name, value] : state.values)
    leftOut.push_back(name);
  if (tensors.empty())
    throw InputError(folder + ": expected tensors of a model, got none");

  std::vector<std::vector<std::string>> files(1);
  int64_t total = 0, filled = 0;
  for (const auto &[theirs, tensor] : tensors) {
    int64_t bytes = tensor.second->spec.numBytes();
    if (!files.back().empty() && bytes > fileBytes - filled) {
      files.emplace_back();
      filled = 0;
    }
    files.back().push_back(theirs);
    filled += bytes;
    total += bytes;
  }

  makeEmptyFolder(folder);
  nlohmann::json index = {{"metadata", {{"total_size", total}}},
                          {"weight_map", nlohmann::json::object()}};
  for (size_t i = 0; i < files.size(); ++i) {
    std::string name = fileName(i, files.size());
    std::vector<Whole> wholes;
    std::vector<NamedTensor> named;
    for (const std::string &theirs : files[i]) {
      const SavedTensor &tensor = *tensors.at(theirs).second;
      wholes.emplace_back(tensor);
      named.push_back({theirs, tensor.spec, wholes.back().data});
      index["weight_map"][theirs] = name;
    }
    OutputFile file((fs::path(folder) / name).string());
    writeSafeTensors(file, named);
  }
  OutputFile file((fs::path(folder) / kIndex).string());
  file.write(index.dump(2) + "\n");
  file.commit();
  return leftOut;
}

} // namespace fsdp::runtime
