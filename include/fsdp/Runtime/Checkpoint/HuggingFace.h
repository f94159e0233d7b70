//===- HuggingFace.h - model folders of Hugging Face ----------------------===//
//
// Safetensors files, and `model.safetensors.index.json`, which says which
// tensor is in which file (WeightFiles.h). They contain only a model's tensors.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_CHECKPOINT_HUGGINGFACE_H
#define FSDP_RUNTIME_CHECKPOINT_HUGGINGFACE_H

#include "fsdp/Runtime/Checkpoint/Chunks.h"
#include "fsdp/Runtime/Checkpoint/NameMap.h"

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::runtime {

/// Whether the path is such a folder, or a file of one.
bool isHuggingFace(const std::string &path);

/// Reads a folder with an index or a model.safetensors, an index, or a single
/// file. In a folder, the index must list each safetensors file and each tensor
/// in it. With a map, tensors get our names; a tensor with several names
/// appears under each. Throws InputError.
SavedState readHuggingFace(const std::string &path, const NameMap *map);

/// The most bytes of a file, unless a single tensor has more.
inline constexpr int64_t kHuggingFaceFileBytes = 5'000'000'000;

/// Writes the model's tensors whole, in files of up to `fileBytes`, and the
/// index, to a folder that is new or empty. With a map, tensors get their names
/// there; tensors that get the same name must be equal. Returns what is left
/// out: values, and tensors of an optimizer and the like. Throws InputError and
/// RunError.
std::vector<std::string>
writeHuggingFace(const std::string &folder, const SavedState &state,
                 const NameMap *map, int64_t fileBytes = kHuggingFaceFileBytes);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CHECKPOINT_HUGGINGFACE_H
