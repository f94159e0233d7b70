//===- WeightFiles.h - initial weights from one file or many --------------===//
//
// A safetensors file, or a Hugging Face index (`model.safetensors.index.json`:
// an object "weight_map" from tensor names to files beside it, in its folder or
// below), or a folder with one index. Names and dtypes may be those of a
// published checkpoint:
//
//   - a tied parameter may be stored under any of its names;
//   - a checkpoint of the base model lacks the first segment of the names
//     ("h.0.ln_1.weight" for "transformer.h.0.ln_1.weight");
//   - floating-point tensors are converted to the parameter's dtype.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_FILES_WEIGHTFILES_H
#define FSDP_RUNTIME_FILES_WEIGHTFILES_H

#include "fsdp/Runtime/Files/SafeTensors.h"

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

namespace fsdp::runtime {

class WeightFiles {
public:
  /// Opens and checks everything that `path` names. Throws InputError.
  explicit WeightFiles(const std::string &path);

  const std::string &path() const { return filePath; }
  /// The files, in the order of their names.
  const std::vector<SafeTensors> &opened() const { return files; }
  /// Throws InputError if a file has a tensor that the index does not name, or
  /// names as another file's.
  void checkIndexIsWhole() const;
  /// Throws InputError if a parameter, or a persistent buffer, of the plan is
  /// missing or has another shape. Other buffers may be absent: published
  /// checkpoints do not have them.
  void check(const plan::Plan &plan) const;
  /// Whether the buffer is there.
  bool has(const plan::Buffer &buffer) const;
  /// Copies a rank's part of the parameter, which begins at row `begin` of the
  /// sharded dimension, to `to`; for an ignored parameter, all of it.
  void read(const plan::Param &param, int64_t begin, at::Tensor to) const;
  /// Copies the buffer, which must be there.
  void read(const plan::Buffer &buffer, at::Tensor to) const;
  /// Releases this process's pages of the files.
  void dropPages() const;
  /// The files that are read: all of opened(), and the index.
  std::vector<std::string> paths() const;
  /// Distinguishes files by their content (WatchedFile::sampledHash).
  std::string fingerprint() const;
  /// As SafeTensors::hash; an index has none and gives "".
  std::string hash() const;
  /// SafeTensors::checkHash of every file.
  void checkHash() const;

private:
  using Entry = SafeTensors::Entry;

  void openIndex();
  /// Null if none of the names is there.
  const Entry *find(const std::vector<std::string> &names) const;
  const Entry *findAny(const plan::Param &param) const;
  const Entry &require(const Entry *entry, const std::string &name,
                       const plan::TensorSpec &spec, const char *what) const;
  /// A view of the file.
  static at::Tensor wholeOf(const Entry &entry);

  std::string filePath;
  std::vector<SafeTensors> files;
  std::map<std::string, const Entry *> table;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_FILES_WEIGHTFILES_H
