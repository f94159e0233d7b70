//===- DurableFile.cpp - files that survive a crash -----------------------===//
#include "fsdp/Runtime/Checkpoint/DurableFile.h"
#include "fsdp/Runtime/Error.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

namespace fsdp::runtime {

namespace {

constexpr size_t kAlignment = 4096;

} // namespace

DurableFile::DurableFile(std::string given, Progress &progress, Options chosen)
    : path(std::move(given)), progress(progress), options(std::move(chosen)),
      buffer(static_cast<std::byte *>(
                 std::aligned_alloc(kAlignment, options.pieceBytes)),
             std::free) {
  if (!buffer)
    throw std::bad_alloc();
  fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
            0666);
  if (fd < 0)
    fail("create");
}

DurableFile::~DurableFile() {
  if (fd >= 0)
    close(fd);
}

void DurableFile::fail(const char *action) const {
  throw RunError(path + ": cannot " + action + ": " + std::strerror(errno));
}

void DurableFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    size_t count = std::min(bytes.size(), options.pieceBytes - filled);
    std::memcpy(buffer.get() + filled, bytes.data(), count);
    filled += count;
    bytes = bytes.subspan(count);
    if (filled == options.pieceBytes)
      flush();
  }
}

void DurableFile::flush() {
  if (options.check)
    options.check();
  progress.reach(options.write);
  hashed.add({buffer.get(), filled});
  for (size_t done = 0; done < filled;) {
    ssize_t count =
        pwrite(fd, buffer.get() + done, filled - done, off_t(written + done));
    if (count < 0 && errno == EINTR)
      continue;
    if (count == 0)
      errno = EIO;
    if (count <= 0)
      fail("write");
    done += size_t(count);
  }
  written += filled;
  filled = 0;
}

void DurableFile::finish() {
  if (filled > 0)
    flush();
  if (options.check)
    options.check();
  progress.reach(options.sync);
  if (fsync(fd) != 0)
    fail("write to the disk");
  if (close(std::exchange(fd, -1)) != 0)
    fail("close");
}

void syncFolder(const std::string &path) {
  int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  auto fail = [&] {
    int reason = errno;
    if (fd >= 0)
      close(fd);
    throw RunError(path +
                   ": cannot write to the disk: " + std::strerror(reason));
  };
  // EINVAL: of file systems whose folders need none.
  if (fd < 0 || (fsync(fd) != 0 && errno != EINVAL))
    fail();
  close(fd);
}

} // namespace fsdp::runtime
