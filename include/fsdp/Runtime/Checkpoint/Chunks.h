//===- Chunks.h - a checkpoint as the boxes that ranks wrote --------------===//
//
// What all checkpoint formats have in common: a tensor is saved as chunks, each
// a box of the tensor, and chunks may lie in different files. A reader proves
// that the chunks of each tensor tile it (checkTiling), and may then gather any
// other box of the tensor (copyBox). That is how a checkpoint is loaded at
// another world size.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_CHECKPOINT_CHUNKS_H
#define FSDP_RUNTIME_CHECKPOINT_CHUNKS_H

#include "fsdp/Plan/Tensors.h"

#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace fsdp::runtime {

/// A box of a tensor: [offsets[d], offsets[d] + sizes[d]) of each dimension.
/// For a tensor without dimensions both are empty, and the box is its only
/// element.
struct Chunk {
  std::vector<int64_t> offsets, sizes;

  bool operator==(const Chunk &) const = default;
};

/// A chunk where it was saved.
struct ChunkData {
  Chunk chunk;
  /// Row-major elements, borrowed (SavedState::memory).
  std::span<const std::byte> data;
  /// The path of the file that the elements come from, for messages.
  std::string file;
};

struct SavedTensor {
  /// Of the whole tensor.
  plan::TensorSpec spec;
  /// In any order. A chunk without elements is legal, anywhere in the tensor.
  std::vector<ChunkData> chunks;
};

/// A checkpoint. Names are torchtitan's (docs/checkpoints.md).
struct SavedState {
  std::map<std::string, SavedTensor> tensors;
  /// Everything that is not a tensor. Bytes are json's binary.
  std::map<std::string, nlohmann::json> values;
  /// For names that DCP derived from nested dicts and lists: the keys and
  /// indices that lead there, ["train_state", "sizes", 0] of
  /// "train_state.sizes.0".
  std::map<std::string, nlohmann::json> paths;
  /// Keeps alive what chunks borrow: mapped files, copies.
  std::vector<std::shared_ptr<const void>> memory;
};

/// "[0:4, 2:8]", for messages.
std::string describe(const Chunk &box);

/// The bytes of the tensor. Throws InputError, beginning with `place`, for a
/// shape with a negative size or with more bytes than an int64_t can count.
int64_t checkedBytes(const std::string &place, const std::string &name,
                     const plan::TensorSpec &spec);

/// Throws InputError unless the chunks tile the tensor `name`: each lies within
/// it and has the bytes of its box, and each element is in exactly one. The
/// message names the tensor, the files, and a box that is missing or
/// duplicated; it begins with `place`, the file or folder of the checkpoint, if
/// no single file is at fault.
///
/// Takes any number of dimensions. With n chunks it takes O(n log n) if they
/// are cut along one dimension or as a grid. Chunks whose bounds cross such
/// that it would take far longer are an InputError, too.
void checkTiling(const std::string &place, const std::string &name,
                 const SavedTensor &tensor);

/// Gathers the box, which must lie within the tensor, from the chunks, which
/// must tile the tensor, into `to`: row-major, and of the box's size.
void copyBox(const SavedTensor &tensor, const Chunk &box,
             std::span<std::byte> to);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CHECKPOINT_CHUNKS_H
