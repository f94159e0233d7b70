//===- Dcp.cpp - checkpoints of torch.distributed.checkpoint --------------===//
#include "fsdp/Runtime/Checkpoint/Dcp.h"
#include "fsdp/Runtime/Checkpoint/TorchItems.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Files/Files.h"
#include "fsdp/Runtime/Files/MappedFile.h"
#include "fsdp/Runtime/Files/SafeTensors.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <span>
#include <system_error>
#include <utility>

namespace fsdp::runtime {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kMetadataFile = ".metadata", kSuffix = ".distcp";
/// Of .metadata: that of 1024 ranks of a model of 1000 tensors has half of it.
constexpr size_t kMaxMetadata = size_t(1) << 30;

std::string pathOf(const std::string &folder, std::string_view file) {
  return (fs::path(folder) / file).string();
}

/// Files of items in the folder.
std::vector<std::string> itemFiles(const std::string &folder) {
  std::vector<std::string> files;
  std::error_code error;
  for (const fs::directory_entry &entry : fs::directory_iterator(folder, error))
    if (entry.path().extension() == kSuffix)
      files.push_back(entry.path().filename().string());
  if (error)
    throw InputError(folder + ": cannot be read: " + error.message());
  std::sort(files.begin(), files.end());
  return files;
}

/// The files of a checkpoint, which items fill.
class ItemFiles {
public:
  ItemFiles(const std::string &folder, const DcpMetadata &metadata)
      : folder(folder) {
    for (const auto &[name, tensor] : metadata.tensors)
      for (const DcpMetadata::SavedChunk &chunk : tensor.chunks)
        parts[chunk.place.file].push_back({&chunk.place, &name});
    for (const auto &[name, place] : metadata.values)
      parts[place.file].push_back({&place, &name});
    for (auto &[file, items] : parts)
      open(file, items);
    for (const std::string &file : itemFiles(folder)) {
      // A rank that had nothing to save leaves an empty file.
      std::string path = pathOf(folder, file);
      if (!parts.contains(file) && !MappedFile(path).bytes().empty())
        throw InputError(path + ": a file of another checkpoint: nothing in " +
                         pathOf(folder, kMetadataFile) + " refers to it");
    }
  }

  std::span<const std::byte> bytes(const DcpPlace &place) const {
    return files.at(place.file)
        ->bytes()
        .subspan(size_t(place.offset), size_t(place.length));
  }

  void giveTo(SavedState &state) {
    for (auto &[name, file] : files)
      state.memory.push_back(std::move(file));
  }

private:
  using Item = std::pair<const DcpPlace *, const std::string *>;

  void open(const std::string &file, std::vector<Item> &items) {
    std::string path = pathOf(folder, file);
    auto mapped = std::make_shared<MappedFile>(path);
    std::sort(items.begin(), items.end(), [](const Item &a, const Item &b) {
      return a.first->offset < b.first->offset;
    });
    int64_t end = 0;
    for (auto [place, name] : items) {
      if (place->offset != end)
        throw InputError(path + ": expected an item at byte " +
                         std::to_string(end) + ", got the item of \"" + *name +
                         "\" at byte " + std::to_string(place->offset));
      end += place->length;
    }
    if (uint64_t(end) != mapped->bytes().size())
      throw InputError(path + ": expected " + std::to_string(end) +
                       " bytes of items, got " +
                       std::to_string(mapped->bytes().size()));
    files.emplace(file, std::move(mapped));
  }

  const std::string &folder;
  std::map<std::string, std::vector<Item>> parts;
  std::map<std::string, std::shared_ptr<MappedFile>> files;
};

DcpMetadata openMetadata(const std::string &folder) {
  std::string path = pathOf(folder, kMetadataFile);
  std::error_code error;
  if (!fs::exists(path, error))
    throw InputError(
        path +
        ": not found; PyTorch writes it last: the save did not end, or it was "
        "made with use_collectives=False, which is not supported");
  MappedFile file(path);
  if (file.bytes().size() > kMaxMetadata)
    throw InputError(path + ": expected at most " +
                     std::to_string(kMaxMetadata) + " bytes, got " +
                     std::to_string(file.bytes().size()));
  return readDcpMetadata(path, file.bytes());
}

} // namespace

bool isDcp(const std::string &folder) {
  std::error_code error;
  if (!fs::is_directory(folder, error))
    return false;
  return fs::exists(pathOf(folder, kMetadataFile), error) ||
         !itemFiles(folder).empty();
}

SavedState readDcp(const std::string &folder) {
  DcpMetadata metadata = openMetadata(folder);
  SavedState state;
  ItemFiles files(folder, metadata);
  for (const auto &[name, tensor] : metadata.tensors) {
    SavedTensor &saved = state.tensors[name];
    saved.spec = tensor.spec;
    for (const auto &[chunk, place] : tensor.chunks) {
      std::string path = pathOf(folder, place.file);
      std::string item = path + ": item \"" + name + "\" " + describe(chunk);
      TorchTensor read = readTorchTensor(item, files.bytes(place));
      if (plan::TensorSpec want{chunk.sizes, tensor.spec.dtype};
          read.spec != want)
        throw InputError(item + ": expected " + describe(want) + ", got " +
                         describe(read.spec));
      saved.chunks.push_back({chunk, read.data, path});
      if (read.memory)
        state.memory.push_back(std::move(read.memory));
    }
    checkTiling(folder, name, saved);
  }
  for (const auto &[name, place] : metadata.values)
    state.values[name] =
        readTorchValue(pathOf(folder, place.file) + ": item \"" + name + "\"",
                       files.bytes(place));
  state.paths = std::move(metadata.paths);
  files.giveTo(state);
  return state;
}

namespace {

/// Appends items to a file; an item is written in many small pieces.
class ItemWriter {
public:
  ItemWriter(const std::string &folder, std::string file)
      : name(std::move(file)), out(pathOf(folder, name)) {}

  /// `write` is called with what takes the item's bytes.
  template <typename Write> DcpPlace item(Write &&write) {
    int64_t begin = end;
    write([this](std::string_view bytes) { append(bytes); });
    return {name, begin, end - begin};
  }

  void commit() {
    flush();
    out.commit();
  }

private:
  static constexpr size_t kBuffer = size_t(1) << 20;

  void append(std::string_view bytes) {
    end += int64_t(bytes.size());
    if (buffer.size() + bytes.size() > kBuffer)
      flush();
    if (bytes.size() > kBuffer)
      out.write(bytes);
    else
      buffer += bytes;
  }
  void flush() {
    out.write(buffer);
    buffer.clear();
  }

  std::string name;
  OutputFile out;
  std::string buffer;
  int64_t end = 0;
};

bool isEmpty(const std::vector<int64_t> &sizes) {
  return std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
}

} // namespace

DcpMetadata writeDcpPart(const std::string &folder, int64_t rank,
                         const SavedState &part) {
  DcpMetadata written;
  written.paths = part.paths;
  ItemWriter out(folder,
                 "__" + std::to_string(rank) + "_0" + std::string(kSuffix));
  for (const auto &[name, value] : part.values) {
    bool tuples = name.find("param_groups.") != std::string::npos;
    written.values[name] =
        out.item([&](auto &&write) { writeTorchValue(value, tuples, write); });
  }
  for (const auto &[name, tensor] : part.tensors) {
    DcpMetadata::Tensor &saved = written.tensors[name];
    saved.spec = tensor.spec;
    // DCP identifies a chunk by where it begins.
    bool hasEmpty = false;
    for (const ChunkData &chunk : tensor.chunks) {
      if (isEmpty(chunk.chunk.sizes) &&
          (!isEmpty(tensor.spec.shape) || std::exchange(hasEmpty, true)))
        continue;
      plan::TensorSpec spec{chunk.chunk.sizes, tensor.spec.dtype};
      saved.chunks.push_back({chunk.chunk, out.item([&](auto &&write) {
                                writeTorchTensor(spec, chunk.data, write);
                              })});
    }
  }
  out.commit();
  return written;
}

void finishDcp(const std::string &folder,
               const std::vector<DcpMetadata> &parts) {
  DcpMetadata all;
  std::map<std::string, SavedTensor> tensors;
  for (const DcpMetadata &part : parts) {
    all.paths.insert(part.paths.begin(), part.paths.end());
    for (const auto &[name, tensor] : part.tensors) {
      auto [it, added] = all.tensors.emplace(name, tensor);
      if (!added) {
        if (it->second.spec != tensor.spec)
          throw InputError(folder + ": tensor \"" + name + "\": expected " +
                           describe(it->second.spec) + " of every rank, got " +
                           describe(tensor.spec));
        // For a tensor without elements one empty chunk is enough.
        if (!isEmpty(tensor.spec.shape))
          it->second.chunks.insert(it->second.chunks.end(),
                                   tensor.chunks.begin(), tensor.chunks.end());
      }
    }
    for (const auto &[name, place] : part.values)
      if (!all.values.emplace(name, place).second)
        throw InputError(folder + ": value \"" + name +
                         "\" appears twice, in " + all.values.at(name).file +
                         " and " + place.file);
  }
  for (const auto &[name, tensor] : all.tensors) {
    SavedTensor saved{tensor.spec, {}};
    checkedBytes(folder, name, tensor.spec);
    for (const auto &[chunk, place] : tensor.chunks) {
      plan::TensorSpec spec{chunk.sizes, tensor.spec.dtype};
      // The bytes are written; their number is what counts here.
      std::span<const std::byte> data(static_cast<std::byte *>(nullptr),
                                      size_t(spec.numBytes()));
      saved.chunks.push_back({chunk, data, pathOf(folder, place.file)});
    }
    checkTiling(folder, name, saved);
    if (all.values.contains(name))
      throw InputError(folder + ": \"" + name + "\" is a tensor and a value");
  }
  OutputFile out(pathOf(folder, kMetadataFile));
  out.write(writeDcpMetadata(all));
  out.commit();
}

void writeDcp(const std::string &folder, const SavedState &state) {
  makeEmptyFolder(folder);
  finishDcp(folder, {writeDcpPart(folder, 0, state)});
}

} // namespace fsdp::runtime
