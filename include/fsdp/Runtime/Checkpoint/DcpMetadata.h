//===- DcpMetadata.h - the file .metadata of a DCP checkpoint -------------===//
//
// A pickle of torch.distributed.checkpoint.metadata.Metadata: the tensors and
// values of a checkpoint, and where their items lie.
//
// The format has no checksum. What is written here ends with one, behind the
// pickle's end, where Python does not look; a mark in the pickle says so.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_CHECKPOINT_DCPMETADATA_H
#define FSDP_RUNTIME_CHECKPOINT_DCPMETADATA_H

#include "fsdp/Plan/Tensors.h"
#include "fsdp/Runtime/Checkpoint/Chunks.h"

#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace fsdp::runtime {

/// Where an item lies, in bytes.
struct DcpPlace {
  std::string file; ///< in the folder, without any other
  int64_t offset = 0, length = 0;
};

struct DcpMetadata {
  struct SavedChunk {
    Chunk chunk;
    DcpPlace place;
  };
  struct Tensor {
    plan::TensorSpec spec;
    std::vector<SavedChunk> chunks;
  };

  std::map<std::string, Tensor> tensors;
  std::map<std::string, DcpPlace> values;
  /// As of a SavedState; of a name without, torchtitan's: names that begin with
  /// one of its objects ("optimizer.", "lr_scheduler.", "train_state.",
  /// "dataloader.") lie in it, others in none.
  std::map<std::string, nlohmann::json> paths;
};

/// Reads what PyTorch, of any version since 2.0, or this project has written.
/// Each chunk and value has its item, each item is one's, and files are in the
/// folder itself. Throws InputError that begins with `path`, which is only
/// named.
DcpMetadata readDcpMetadata(const std::string &path,
                            std::span<const std::byte> bytes);

/// As PyTorch of any version since 2.0 reads it.
std::string writeDcpMetadata(const DcpMetadata &metadata);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CHECKPOINT_DCPMETADATA_H
