//===- NativeCheckpoint.cpp - reading a native checkpoint -----------------===//
#include "fsdp/Runtime/Checkpoint/NativeCheckpoint.h"
#include "fsdp/Plan/ParseJson.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Files/MappedFile.h"
#include "fsdp/Runtime/Files/SafeTensors.h"
#include "fsdp/Support/Files.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace fsdp::runtime {

namespace {

constexpr size_t kPiece = size_t(8) << 20;
constexpr std::string_view kOwn = "rank.";
constexpr std::string_view kOptimizerState = "optimizer.state.";

void checkSize(const std::string &path, uint64_t got, uint64_t want) {
  if (got != want)
    throw InputError(path + ": damaged: expected " + std::to_string(want) +
                     " bytes, got " + std::to_string(got));
}

/// A file of a known size, to be read.
class InputFile {
public:
  InputFile(const std::string &path, uint64_t bytes) : path(path) {
    fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
      throw InputError(path + ": cannot open: " + std::strerror(errno));
    try {
      struct stat info{};
      if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode))
        throw InputError(path + ": not a regular file");
      checkSize(path, uint64_t(info.st_size), bytes);
    } catch (...) {
      close(fd);
      throw;
    }
  }
  InputFile(const InputFile &) = delete;
  InputFile &operator=(const InputFile &) = delete;
  ~InputFile() { close(fd); }

  void read(uint64_t begin, std::span<std::byte> to) const {
    while (!to.empty()) {
      ssize_t count = pread(fd, to.data(), to.size(), off_t(begin));
      if (count < 0 && errno == EINTR)
        continue;
      if (count <= 0)
        throw InputError(path + ": cannot read: " +
                         (count < 0 ? std::strerror(errno)
                                    : "it was truncated in the meantime"));
      begin += uint64_t(count);
      to = to.subspan(size_t(count));
    }
  }

private:
  const std::string &path;
  int fd = -1;
};

std::string readManifestText(const std::string &path) {
  std::string text;
  if (std::string error = fsdp::readFile(path, plan::kMaxJsonBytes, text);
      !error.empty())
    throw InputError(path + ": " + error);
  return text;
}

std::string_view textOf(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char *>(bytes.data()), bytes.size()};
}

} // namespace

std::string ownName(int64_t rank, const std::string &name) {
  return std::string(kOwn) + std::to_string(rank) + "." + name;
}

bool isOwnName(const std::string &name) {
  size_t end = name.find('.', kOwn.size());
  return name.starts_with(kOwn) && end != std::string::npos &&
         end > kOwn.size() &&
         name.find_first_not_of("0123456789", kOwn.size()) == end;
}

std::string whyReserved(const std::string &name) {
  if (!isOwnName(name) && !name.starts_with(kOptimizerState))
    return "";
  return "'" + name +
         "': a checkpoint has something else under names that begin with "
         "\"rank.N.\" or \"optimizer.state.\"; expected another name";
}

NativeCheckpoint::NativeCheckpoint(std::string given)
    : folder(std::move(given)) {
  std::string path = folder + "/" + kManifestName;
  std::string text = readManifestText(path);
  contents = parseManifest(text, path);
  ownHash = hashBytes(text);
  std::map<std::string, SavedTensor> tensors;
  for (const auto &[name, spec] : contents.tensors)
    tensors[name].spec = spec;
  for (const Manifest::File &file : contents.files) {
    InputFile(pathOf(file), file.bytes);
    for (const Manifest::FileChunk &chunk : file.chunks) {
      auto tensor = tensors.find(chunk.tensor);
      if (tensor == tensors.end())
        throw InputError(path + ": \"" + file.name + "\" has \"" +
                         chunk.tensor + "\", which is not one of its tensors");
      // The size alone is looked at.
      tensor->second.chunks.push_back(
          {chunk.chunk,
           {static_cast<const std::byte *>(nullptr), chunk.bytes},
           pathOf(file)});
      places[chunk.tensor].push_back({&file, &chunk});
    }
  }
  for (const auto &[name, tensor] : tensors)
    checkTiling(folder, name, tensor);
}

bool NativeCheckpoint::looksWhole(const std::string &folder) {
  try {
    (void)NativeCheckpoint(folder);
    return true;
  } catch (const InputError &) {
    return false;
  }
}

void NativeCheckpoint::verify(size_t index,
                              const std::function<void()> &check) const {
  const Manifest::File &file = contents.files[index];
  std::string path = pathOf(file);
  InputFile input(path, file.bytes);
  HashState hash;
  std::vector<std::byte> piece(std::min<uint64_t>(kPiece, file.bytes));
  for (uint64_t begin = 0; begin < file.bytes; begin += piece.size()) {
    if (check)
      check();
    piece.resize(std::min<uint64_t>(kPiece, file.bytes - begin));
    input.read(begin, piece);
    hash.add(piece);
  }
  if (std::string got = hash.text(); got != file.hash)
    throw InputError(path +
                     ": damaged, or of another checkpoint: expected "
                     "hash " +
                     file.hash + ", got " + got);
}

void NativeCheckpoint::readChunk(const Place &place,
                                 std::span<std::byte> to) const {
  std::string path = pathOf(*place.file);
  InputFile(path, place.file->bytes).read(place.chunk->begin, to);
  if (std::string got = hashBytes(textOf(to)); got != place.chunk->hash)
    throw InputError(path + ": \"" + place.chunk->tensor +
                     "\": damaged: expected hash " + place.chunk->hash +
                     ", got " + got);
}

void NativeCheckpoint::read(const std::string &tensor, const Chunk &box,
                            std::span<std::byte> to) const {
  auto found = places.find(tensor);
  if (to.empty() || found == places.end())
    return;
  for (const Place &place : found->second)
    if (place.chunk->chunk == box)
      return readChunk(place, to);
  SavedTensor one{contents.tensors.at(tensor), {}};
  for (const Place &place : found->second) {
    const Chunk &chunk = place.chunk->chunk;
    bool meets = true;
    for (size_t dim = 0; dim < box.offsets.size(); ++dim)
      meets &= chunk.offsets[dim] < box.offsets[dim] + box.sizes[dim] &&
               box.offsets[dim] < chunk.offsets[dim] + chunk.sizes[dim];
    if (!meets || place.chunk->bytes == 0)
      continue;
    std::vector<std::byte> bytes(place.chunk->bytes);
    readChunk(place, bytes);
    one.chunks = {{chunk, bytes, pathOf(*place.file)}};
    copyBox(one, box, to);
  }
}

SavedState NativeCheckpoint::state() const {
  SavedState state;
  for (const auto &[name, spec] : contents.tensors)
    state.tensors[name].spec = spec;
  for (const Manifest::File &file : contents.files) {
    std::string path = pathOf(file);
    auto mapped = std::make_shared<const MappedFile>(path);
    checkSize(path, mapped->bytes().size(), file.bytes);
    for (const Manifest::FileChunk &chunk : file.chunks)
      state.tensors[chunk.tensor].chunks.push_back(
          {chunk.chunk, mapped->bytes().subspan(chunk.begin, chunk.bytes),
           path});
    state.memory.push_back(std::move(mapped));
  }
  for (const auto &[name, value] : contents.values.items())
    state.values[name] = value;
  return state;
}

} // namespace fsdp::runtime
