//===- Manifest.h - what a native checkpoint consists of ------------------===//
//
// The file manifest.json of a checkpoint's folder. It begins with the hash of
// the rest of the file, and has the hash and size of every other file and of
// each chunk in it: a checkpoint that does not match its manifest is damaged.
// docs/checkpoints.md describes it.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_CHECKPOINT_MANIFEST_H
#define FSDP_RUNTIME_CHECKPOINT_MANIFEST_H

#include "fsdp/Plan/Tensors.h"
#include "fsdp/Runtime/Checkpoint/Chunks.h"

#include <nlohmann/json.hpp>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::runtime {

/// Version of the form. A reader accepts exactly this one.
inline constexpr int64_t kManifestVersion = 1;
inline constexpr char kManifestName[] = "manifest.json";

/// Where a run was when it was saved: everything that is not a tensor.
struct RunState {
  int64_t step = 0;    ///< steps done
  int64_t samples = 0; ///< samples of the data that all ranks have taken
  int64_t updates = 0; ///< of the optimizer: excludes skipped steps
  uint64_t seed = 0;   ///< --seed
  std::string data;    ///< fingerprint of the data; empty if it is random
  std::string plan;    ///< hash of the plan; empty: not known
  /// 32 hex digits of the run; one that goes on from it has the same. Empty in
  /// a checkpoint that is converted, or of an older version.
  std::string run;
  int64_t worldSize = 1; ///< 0: not known
  struct Scaler {
    double scale = 0;
    int64_t growthTracker = 0;
    bool operator==(const Scaler &) const = default;
  };
  std::optional<Scaler> scaler;
  /// What else the bits of a step depend on: versions, device, threads.
  std::map<std::string, std::string> environment;
};

struct Manifest {
  struct FileChunk {
    std::string tensor;
    Chunk chunk;
    uint64_t begin = 0; ///< its first byte in the file
    uint64_t bytes = 0;
    std::string hash;
  };
  struct File {
    std::string name; ///< in the folder
    uint64_t bytes = 0;
    std::string hash;
    /// In the order of the file; header and chunks leave no gap.
    std::vector<FileChunk> chunks;
  };

  /// 32 hex digits that identify the save; the header of each file has them,
  /// too.
  std::string attempt;
  RunState state;
  std::map<std::string, plan::TensorSpec> tensors;
  /// Further names of tied parameters, and the name under which each is saved.
  std::map<std::string, std::string> aliases;
  /// Values of a converted checkpoint, which other programs read
  /// (SavedState::values).
  nlohmann::json values = nlohmann::json::object();
  std::vector<File> files;
};

/// The text of the file.
std::string printManifest(const Manifest &manifest);

/// Throws InputError that begins with `path` for anything that printManifest
/// does not write: a wrong hash, names that repeat, a chunk outside its file, a
/// file name outside its folder.
Manifest parseManifest(std::string_view text, const std::string &path);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CHECKPOINT_MANIFEST_H
