//===- WatchedFile.h - a file that must not change under a run ------------===//
#ifndef FSDP_RUNTIME_FILES_WATCHEDFILE_H
#define FSDP_RUNTIME_FILES_WATCHEDFILE_H

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include <sys/stat.h>

namespace fsdp::runtime {

/// A regular file, open for reading, with the size and the time of its last
/// change when it was opened. It is read by pread and not by mapping: a
/// truncated file then gives an error, where a mapping would give SIGBUS.
///
/// A change is noticed by size and time, after the bytes were read. Two kinds
/// of change remain unnoticed: one that restores the old time, and one made so
/// soon that the file system's clock did not tick in between. Renaming another
/// file over the path changes nothing here: the opened file is still the one
/// that is read.
///
/// Survives fork, and may be read by several threads.
class WatchedFile {
public:
  /// Throws InputError that names the file.
  explicit WatchedFile(std::string path);
  WatchedFile(WatchedFile &&other) noexcept;
  WatchedFile &operator=(WatchedFile &&) = delete;
  ~WatchedFile();

  const std::string &path() const { return name; }
  /// Its size when it was opened.
  uint64_t size() const { return uint64_t(opened.st_size); }
  int descriptor() const { return fd; }

  /// The bytes from `offset`, which must have been in the file when it was
  /// opened. Throws RunError if they cannot be read, or the file is not as it
  /// was.
  void read(uint64_t offset, std::span<std::byte> to) const;

  /// "xxh3:" and the 32 hex digits of XXH3-128 over the file.
  std::string hash() const;
  /// The same over its size and at most 64 blocks of 4 KiB, spread evenly,
  /// including the first and the last block of the file. It detects other files
  /// and most changes at little cost.
  std::string sampledHash() const;

private:
  void readAll(uint64_t offset, std::span<std::byte> to) const;
  void check() const;

  std::string name;
  int fd = -1;
  struct stat opened{};
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_FILES_WATCHEDFILE_H
