//===- EventFile.h - scalars for TensorBoard ------------------------------===//
#ifndef FSDP_RUNTIME_FILES_EVENTFILE_H
#define FSDP_RUNTIME_FILES_EVENTFILE_H

#include "fsdp/Runtime/Files/Files.h"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::runtime {

/// A TensorBoard event file in a folder, which is created if it does not exist:
/// records as TFRecordWriter frames them (length and data, each with a masked
/// CRC-32C), of Event messages (tensorflow/core/util/event.proto).
class EventFile {
public:
  using Scalars = std::vector<std::pair<std::string, double>>;

  /// Begins a file of its own beside those of other runs. Throws InputError.
  explicit EventFile(const std::string &folder);

  /// Appends the scalars of a step, float32 values by name. Throws RunError.
  void add(int64_t step, const Scalars &scalars);

private:
  void append(const std::string &event);

  std::optional<LineFile> file;
};

/// CRC-32C (Castagnoli) of the bytes.
uint32_t crc32c(std::string_view bytes);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_FILES_EVENTFILE_H
