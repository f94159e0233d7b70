//===- DurableFile.h - files that survive a crash -------------------------===//
//
// What a checkpoint is written by: system calls of POSIX alone, whose order is
// what the protocol (SaveProtocol.h) promises. A failed fsync is never
// repeated: the kernel may have dropped what it could not write, and would say
// that all is well.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_CHECKPOINT_DURABLEFILE_H
#define FSDP_RUNTIME_CHECKPOINT_DURABLEFILE_H

#include "fsdp/Runtime/Checkpoint/Progress.h"
#include "fsdp/Runtime/Files/SafeTensors.h"

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>

namespace fsdp::runtime {

/// A new file that is written from its beginning to its end. All throw RunError
/// that names the path.
class DurableFile {
public:
  /// Bytes of one write, whose place in the file is a multiple of 4 KiB: all
  /// but the last have as many.
  static constexpr size_t kPiece = size_t(8) << 20;

  struct Options {
    size_t pieceBytes = kPiece; ///< a multiple of 4096
    SavePoint write = SavePoint::Write, sync = SavePoint::SyncFile;
    /// Asked before each piece; throws where the save is to end.
    std::function<void()> check = {};
  };

  /// There is no file yet. Borrows the progress, to which it tells each write
  /// and the sync.
  DurableFile(std::string path, Progress &progress, Options options);
  DurableFile(std::string path, Progress &progress)
      : DurableFile(std::move(path), progress, Options()) {}
  DurableFile(const DurableFile &) = delete;
  DurableFile &operator=(const DurableFile &) = delete;
  /// Closes the file, which stays as it is.
  ~DurableFile();

  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) {
    write(std::as_bytes(std::span(text.data(), text.size())));
  }
  /// Makes all of it durable but its name, which is the folder's.
  void finish();

  size_t size() const { return written + filled; }
  /// Of what was written. After finish.
  std::string hash() const { return hashed.text(); }

private:
  [[noreturn]] void fail(const char *action) const;
  void flush();

  std::string path;
  Progress &progress;
  Options options;
  int fd = -1;
  std::unique_ptr<std::byte, void (*)(void *)> buffer;
  size_t filled = 0, written = 0;
  HashState hashed;
};

/// Makes the names in a folder durable. Throws RunError.
void syncFolder(const std::string &path);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CHECKPOINT_DURABLEFILE_H
