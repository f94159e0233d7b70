//===- DcpMetadata.h - the file .metadata of a DCP checkpoint -------------===//
//
// A pickle of torch.distributed.checkpoint.metadata.Metadata: the tensors and
// values of a checkpoint, and where their items lie.
//
// The format has no checksum. Files written here have one after the end of the
// pickle, where Python does not look; a mark in the pickle says so.
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
  std::string file; ///< a plain name in the folder
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
  /// As in SavedState. A name without a path gets torchtitan's: names that
  /// begin with one of its objects ("optimizer.", "lr_scheduler.",
  /// "train_state.", "dataloader.") lie in that object, others in none.
  std::map<std::string, nlohmann::json> paths;
};

/// Reads what PyTorch, of any version since 2.0, or this project has written.
/// Each chunk and value must have its item, each item must belong to one of
/// them, and files must be in the folder itself. Throws InputError that begins
/// with `path`, which is used only for that.
DcpMetadata readDcpMetadata(const std::string &path,
                            std::span<const std::byte> bytes);

/// In the form that PyTorch reads, in any version since 2.0.
std::string writeDcpMetadata(const DcpMetadata &metadata);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CHECKPOINT_DCPMETADATA_H
