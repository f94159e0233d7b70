//===- MappedFile.h - a file as memory ------------------------------------===//
#ifndef FSDP_RUNTIME_FILES_MAPPEDFILE_H
#define FSDP_RUNTIME_FILES_MAPPEDFILE_H

#include <cstddef>
#include <span>
#include <string>

namespace fsdp::runtime {

/// A read-only mapping of a whole regular file. Survives fork.
class MappedFile {
public:
  /// Throws InputError that names the file.
  explicit MappedFile(const std::string &path);
  MappedFile(const MappedFile &) = delete;
  MappedFile &operator=(const MappedFile &) = delete;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return memory; }

private:
  std::span<const std::byte> memory;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_FILES_MAPPEDFILE_H
