//===- ShardFile.h - what one rank saves ----------------------------------===//
//
// A safetensors file with the header that torch.distributed.checkpoint's
// HuggingFaceStorageReader expects of a sharded one: besides each tensor's own
// shape, which is its chunk's, the metadata says where in the whole tensor it
// begins. The header is padded so that the data begin at a multiple of 4 KiB.
//
// safetensors has no complex numbers with parts of 2 or 8 bytes: they are saved
// as pairs of float16 or float64, with a last dimension of 2.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_CHECKPOINT_SHARDFILE_H
#define FSDP_RUNTIME_CHECKPOINT_SHARDFILE_H

#include "fsdp/Plan/Tensors.h"
#include "fsdp/Runtime/Checkpoint/Chunks.h"
#include "fsdp/Runtime/Checkpoint/DurableFile.h"
#include "fsdp/Runtime/Checkpoint/Manifest.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace fsdp::runtime {

/// A chunk that a rank saves; a file has one of each tensor.
struct ShardTensor {
  std::string name;
  plan::TensorSpec spec; ///< of the whole tensor
  Chunk chunk;
  std::span<const std::byte> data; ///< borrowed
};

/// "shard-00002-model-00001-of-00001.safetensors" of rank 1.
std::string shardFileName(int64_t rank);

/// Writes a new file, whole and durable, and returns the manifest's entry for
/// it. Throws RunError.
Manifest::File writeShardFile(const std::string &folder, int64_t rank,
                              const std::string &attempt,
                              const std::vector<ShardTensor> &tensors,
                              Progress &progress, DurableFile::Options options);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CHECKPOINT_SHARDFILE_H
