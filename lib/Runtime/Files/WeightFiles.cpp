//===- WeightFiles.cpp - initial weights from one file or many ------------===//
#include "fsdp/Runtime/Files/WeightFiles.h"
#include "fsdp/Plan/ParseJson.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Files/WatchedFile.h"
#include "fsdp/Runtime/Memory/Layout.h"
#include "fsdp/Support/Files.h"

#include <ATen/ops/from_blob.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <set>
#include <system_error>

namespace fsdp::runtime {

using nlohmann::json;

namespace {

/// The file that a path stands for: of a folder, its index.
std::string entryOf(const std::string &path) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (!fs::is_directory(path, error))
    return path;
  std::vector<std::string> indices;
  for (const fs::directory_entry &entry : fs::directory_iterator(path, error))
    if (std::string name = entry.path().string();
        name.ends_with(".safetensors.index.json"))
      indices.push_back(std::move(name));
  if (indices.size() == 1)
    return indices[0];
  throw InputError(path +
                   ": expected a file, or a folder with one index "
                   "(*.safetensors.index.json), got a folder with " +
                   std::to_string(indices.size()));
}

} // namespace

WeightFiles::WeightFiles(const std::string &path) : filePath(entryOf(path)) {
  if (filePath.ends_with(".json")) {
    openIndex();
    return;
  }
  files.emplace_back(filePath);
  for (const auto &[name, entry] : files.back().entries())
    table.emplace(name, &entry);
}

void WeightFiles::openIndex() {
  std::string text;
  if (std::string error = fsdp::readFile(filePath, plan::kMaxJsonBytes, text);
      !error.empty())
    throw InputError(filePath + ": " + error);
  json index;
  try {
    index = plan::parseJson(text, filePath);
  } catch (const plan::PlanError &error) {
    throw InputError(error.what());
  }
  if (!index.is_object() || !index.contains("weight_map") ||
      !index["weight_map"].is_object() || index["weight_map"].empty())
    throw InputError(filePath +
                     ": expected a json object with a \"weight_map\" "
                     "from tensor names to files");
  std::set<std::string> names;
  for (const auto &[tensor, file] : index["weight_map"].items()) {
    if (!file.is_string())
      throw InputError(filePath + ": expected a file name for \"" + tensor +
                       "\", got " + file.dump());
    std::filesystem::path name = file.get<std::string>();
    if (name.empty() || name.is_absolute() ||
        std::find(name.begin(), name.end(), "..") != name.end())
      throw InputError(filePath + ": expected a file in its folder for \"" +
                       tensor + "\", got \"" + name.string() + "\"");
    names.insert(name.string());
  }
  std::map<std::string, size_t> positions;
  std::filesystem::path folder = std::filesystem::path(filePath).parent_path();
  files.reserve(names.size()); // entries are pointed to
  for (const std::string &name : names) {
    positions[name] = files.size();
    files.emplace_back((folder / name).string());
  }
  for (const auto &[tensor, file] : index["weight_map"].items()) {
    const SafeTensors &in = files[positions[file.get<std::string>()]];
    auto it = in.entries().find(tensor);
    if (it == in.entries().end())
      throw InputError(filePath + ": tensor \"" + tensor + "\" is not in " +
                       in.path());
    table.emplace(tensor, &it->second);
  }
}

void WeightFiles::checkIndexIsWhole() const {
  for (const SafeTensors &file : files)
    for (const auto &[name, entry] : file.entries())
      if (auto it = table.find(name); it == table.end() || it->second != &entry)
        throw InputError(filePath + ": tensor \"" + name + "\" of " +
                         file.path() + " is not in its \"weight_map\"");
}

const WeightFiles::Entry *
WeightFiles::find(const std::vector<std::string> &names) const {
  for (const std::string &name : names)
    if (auto it = table.find(name); it != table.end())
      return it->second;
  // A checkpoint of the base model has no name with the model's first segment.
  for (const std::string &name : names) {
    std::string prefix = name.substr(0, name.find('.') + 1);
    auto next = table.lower_bound(prefix);
    if (prefix.empty() ||
        (next != table.end() && next->first.starts_with(prefix)))
      continue;
    if (auto it = table.find(name.substr(prefix.size())); it != table.end())
      return it->second;
  }
  return nullptr;
}

const WeightFiles::Entry *WeightFiles::findAny(const plan::Param &param) const {
  std::vector<std::string> names = {param.name};
  names.insert(names.end(), param.aliases.begin(), param.aliases.end());
  return find(names);
}

const WeightFiles::Entry &WeightFiles::require(const Entry *entry,
                                               const std::string &name,
                                               const plan::TensorSpec &spec,
                                               const char *what) const {
  if (!entry)
    throw InputError(filePath + ": no tensor for " + what + " \"" + name +
                     "\"");
  bool converts = at::isFloatingType(scalarType(entry->spec.dtype)) &&
                  at::isFloatingType(scalarType(spec.dtype));
  if (entry->spec.shape != spec.shape ||
      (entry->spec.dtype != spec.dtype && !converts))
    throw InputError(filePath + ": " + what + " \"" + name + "\": expected " +
                     describe(spec) + ", got " + describe(entry->spec));
  return *entry;
}

void WeightFiles::check(const plan::Plan &plan) const {
  for (const plan::Param &param : plan.params)
    require(findAny(param), param.name, param.spec, "parameter");
  for (const plan::Buffer &buffer : plan.buffers)
    if (buffer.persistent || has(buffer))
      require(find({buffer.name}), buffer.name, buffer.spec, "buffer");
}

bool WeightFiles::has(const plan::Buffer &buffer) const {
  return find({buffer.name}) != nullptr;
}

at::Tensor WeightFiles::wholeOf(const Entry &entry) {
  // Read-only memory, which is only read.
  return at::from_blob(const_cast<std::byte *>(entry.data.data()),
                       entry.spec.shape, scalarType(entry.spec.dtype));
}

void WeightFiles::read(const plan::Param &param, int64_t begin,
                       at::Tensor to) const {
  const Entry &entry =
      require(findAny(param), param.name, param.spec, "parameter");
  if (to.numel() == 0)
    return;
  at::Tensor from = wholeOf(entry);
  if (param.unit != -1)
    from = from.narrow(param.shardDim, begin, to.size(param.shardDim));
  to.copy_(from);
}

void WeightFiles::read(const plan::Buffer &buffer, at::Tensor to) const {
  const Entry &entry =
      require(find({buffer.name}), buffer.name, buffer.spec, "buffer");
  if (to.numel() > 0)
    copyLaidOut(to, wholeOf(entry),
                filePath + ": buffer \"" + buffer.name + "\"");
}

void WeightFiles::dropPages() const {
  for (const SafeTensors &file : files)
    file.dropPages();
}

std::vector<std::string> WeightFiles::paths() const {
  std::vector<std::string> paths;
  for (const SafeTensors &file : files)
    paths.push_back(file.path());
  if (filePath.ends_with(".json"))
    paths.push_back(filePath);
  return paths;
}

std::string WeightFiles::fingerprint() const {
  std::string text;
  for (const std::string &path : paths())
    text += WatchedFile(path).sampledHash() + "\n";
  return hashBytes(text);
}

void WeightFiles::checkHash() const {
  for (const SafeTensors &file : files)
    file.checkHash();
}

std::string WeightFiles::hash() const {
  return filePath.ends_with(".json") ? "" : files.front().hash();
}

} // namespace fsdp::runtime
