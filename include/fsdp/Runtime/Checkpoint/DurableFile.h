//===- DurableFile.h - files that survive a crash -------------------------===//
//
// Checkpoints are written by these functions, which make only POSIX system
// calls, in the order that the protocol (SaveProtocol.h) promises. A failed
// fsync is never repeated: the kernel may have dropped what it could not write,
// and would then report success.
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

/// A new file that is written from beginning to end. All methods throw
/// RunError, which names the path.
class DurableFile {
public:
  /// Bytes of each write but the last. The offset of a write in the file is a
  /// multiple of 4 KiB.
  static constexpr size_t kPiece = size_t(8) << 20;

  struct Options {
    size_t pieceBytes = kPiece; ///< a multiple of 4096
    SavePoint write = SavePoint::Write, sync = SavePoint::SyncFile;
    /// Called before each piece; throws if the save must end.
    std::function<void()> check = {};
  };

  /// The file must not exist. Borrows the progress, to which it reports each
  /// write and the sync.
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
  /// Makes the file durable, except its name, which belongs to the folder.
  void finish();

  size_t size() const { return written + filled; }
  /// The hash of what was written. To be called after finish.
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
