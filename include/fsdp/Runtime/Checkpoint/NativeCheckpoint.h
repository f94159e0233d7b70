//===- NativeCheckpoint.h - reading a native checkpoint -------------------===//
//
// A checkpoint is opened by its manifest, which proves that the chunks of every
// tensor tile it. Nothing that is read is trusted until its hash matches the
// manifest.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_CHECKPOINT_NATIVECHECKPOINT_H
#define FSDP_RUNTIME_CHECKPOINT_NATIVECHECKPOINT_H

#include "fsdp/Runtime/Checkpoint/Chunks.h"
#include "fsdp/Runtime/Checkpoint/Manifest.h"

#include <cstddef>
#include <functional>
#include <map>
#include <span>
#include <string>

namespace fsdp::runtime {

/// The name of a rank's own copy of a tensor that each rank has for itself (a
/// buffer, an ignored parameter, a generator): "rank.3.NAME". If rank 3 has the
/// same bytes as rank 0, there is only rank 0's copy, under its plain name.
std::string ownName(int64_t rank, const std::string &name);
/// Whether it is such a name.
bool isOwnName(const std::string &name);
/// Why a model's tensor cannot have the name in a checkpoint; empty: it can.
std::string whyReserved(const std::string &name);

/// Thread-compatible. All methods throw InputError, which names the file.
class NativeCheckpoint {
public:
  /// Reads the manifest, and compares the sizes of all files.
  explicit NativeCheckpoint(std::string folder);
  NativeCheckpoint(const NativeCheckpoint &) = delete;
  NativeCheckpoint &operator=(const NativeCheckpoint &) = delete;

  /// Whether the constructor would succeed, without the reason why not.
  static bool looksWhole(const std::string &folder);

  const std::string &path() const { return folder; }
  const Manifest &manifest() const { return contents; }
  /// The hash of the manifest, and so of the checkpoint.
  const std::string &hash() const { return ownHash; }

  /// Reads a file of the manifest, by its index, and compares its hash. `check`
  /// is called now and then, and may throw.
  void verify(size_t file, const std::function<void()> &check = {}) const;

  /// The same for all files.
  void verifyAll() const {
    for (size_t file = 0; file < contents.files.size(); ++file)
      verify(file);
  }

  bool has(const std::string &tensor) const {
    return contents.tensors.contains(tensor);
  }
  /// Reads a box that lies within the tensor to `to`, row-major and of the
  /// box's size, and compares the hash of every chunk that it is in.
  void read(const std::string &tensor, const Chunk &box,
            std::span<std::byte> to) const;

  /// The whole checkpoint, in mapped memory; call verify for each file before.
  SavedState state() const;

private:
  /// A chunk, and the file that contains it.
  struct Place {
    const Manifest::File *file;
    const Manifest::FileChunk *chunk;
  };

  std::string pathOf(const Manifest::File &file) const {
    return folder + "/" + file.name;
  }
  void readChunk(const Place &place, std::span<std::byte> to) const;

  std::string folder;
  Manifest contents;
  std::string ownHash;
  std::map<std::string, std::vector<Place>> places;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CHECKPOINT_NATIVECHECKPOINT_H
