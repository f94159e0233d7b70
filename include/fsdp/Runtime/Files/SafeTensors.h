//===- SafeTensors.h - safetensors files, read by mapping -----------------===//
//
// The format: 8 bytes little-endian header length, a JSON header
// {"name": {"dtype", "shape", "data_offsets": [begin, end]}}, then the data.
// https://github.com/huggingface/safetensors#format
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_FILES_SAFETENSORS_H
#define FSDP_RUNTIME_FILES_SAFETENSORS_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Files/Files.h"
#include "fsdp/Runtime/Files/WatchedFile.h"

#include <cstddef>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::runtime {

/// A read-only mapping of a whole safetensors file. The header is checked
/// when opened: every tensor lies inside the file and has the size its shape
/// needs. Survives fork. Not copyable.
class SafeTensors {
public:
  struct Entry {
    plan::TensorSpec spec;
    /// Row-major elements; valid as long as the SafeTensors object.
    std::span<const std::byte> data;
  };

  /// Throws InputError that names the file.
  explicit SafeTensors(const std::string &path);
  /// The same for a file that is already open.
  explicit SafeTensors(const WatchedFile &file);
  SafeTensors(SafeTensors &&other) noexcept;
  SafeTensors &operator=(SafeTensors &&) = delete;
  ~SafeTensors();

  const std::string &path() const { return filePath; }
  const std::map<std::string, Entry> &entries() const { return table; }
  /// The byte of the file where the entry's data begin.
  uint64_t offsetOf(const Entry &entry) const {
    return uint64_t(entry.data.data() - bytes.data());
  }
  /// Releases this process's pages of the file; reading maps them again.
  void dropPages() const;
  /// "xxh3:" and the 32 hex digits of XXH3-128 over the file.
  std::string hash() const;
  /// Throws InputError if the file states the hash of its data (the metadata
  /// "data_hash", which writeSafeTensors and the capture write) and the data
  /// has a different one, so it has changed since. Reads the whole file.
  void checkHash() const;

private:
  void parse();

  std::string filePath;
  std::span<const std::byte> bytes;
  std::span<const std::byte> data;
  std::string dataHash; ///< that of the metadata; empty: none
  std::map<std::string, Entry> table;
};

/// One tensor to write; `data` is borrowed until the write returns.
struct NamedTensor {
  std::string name;
  plan::TensorSpec spec;
  std::span<const std::byte> data;
};

/// Writes the file whole and commits it. Throws RunError.
void writeSafeTensors(OutputFile &file,
                      const std::vector<NamedTensor> &tensors);

/// "xxh3:" and the 32 hex digits of XXH3-128, in canonical form.
std::string hashBytes(std::string_view bytes);

/// The same for bytes that come in parts.
class HashState {
public:
  HashState();
  ~HashState();
  HashState(const HashState &) = delete;
  HashState &operator=(const HashState &) = delete;

  void add(std::span<const std::byte> bytes);
  std::string text() const;

private:
  struct State;
  std::unique_ptr<State> state;
};

/// The format's name of a dtype, "F32"; empty where it has none.
std::string_view safeTensorsName(plan::DType dtype);

/// "float32[2, 3]", for messages.
std::string describe(const plan::TensorSpec &spec);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_FILES_SAFETENSORS_H
