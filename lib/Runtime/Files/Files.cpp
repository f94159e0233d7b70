//===- Files.cpp - what a run reads and writes ----------------------------===//
#include "fsdp/Runtime/Files/Files.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Support/Outputs.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace fsdp::runtime {

namespace {

constexpr mode_t kMode = 0666;

std::string systemError() { return std::strerror(errno); }

/// Whether all was written.
bool writeAll(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    ssize_t done = ::write(fd, bytes.data(), bytes.size());
    if (done < 0 && errno == EINTR)
      continue;
    if (done <= 0)
      return false;
    bytes.remove_prefix(size_t(done));
  }
  return true;
}

std::string randomName(const std::string &beside) {
  std::random_device random;
  char digits[40];
  std::snprintf(digits, sizeof(digits), ".%08x%08x%08x.tmp", random(), random(),
                random());
  return beside + digits;
}

} // namespace

std::string readFile(const std::string &path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  if (!file || !(text << file.rdbuf()))
    throw InputError(path + ": cannot be read");
  return text.str();
}

void makeEmptyFolder(const std::string &path) {
  namespace fs = std::filesystem;
  std::error_code error;
  fs::create_directories(path, error);
  if (error)
    throw InputError(path + ": cannot be made: " + error.message());
  if (!fs::is_empty(path, error))
    throw InputError(path + ": cannot write: expected a new or empty folder");
}

OutputFile::OutputFile(std::string path) : target(std::move(path)) {
  struct stat there{};
  if (lstat(target.c_str(), &there) == 0 && !S_ISREG(there.st_mode) &&
      !S_ISLNK(there.st_mode))
    throw InputError(target + ": cannot write: expected a regular file");
  std::string folder = std::filesystem::path(target).parent_path().string();
  fd = open(folder.empty() ? "." : folder.c_str(),
            O_TMPFILE | O_WRONLY | O_CLOEXEC, kMode);
  // Of file systems, and kernels, without files that have no name.
  if (fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL)) {
    temporary = randomName(target);
    fd = open(temporary.c_str(),
              O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, kMode);
  }
  if (fd < 0)
    throw InputError(target + ": cannot write: " + systemError());
}

OutputFile::~OutputFile() {
  close(fd);
  if (!temporary.empty())
    unlink(temporary.c_str());
}

void OutputFile::fail(const char *action) const {
  throw RunError(target + ": cannot " + action + ": " + systemError());
}

void OutputFile::write(std::string_view bytes) {
  if (!writeAll(fd, bytes))
    fail("write");
}

void OutputFile::commit() {
  if (fsync(fd) != 0)
    fail("write");
  std::string name = temporary;
  if (name.empty()) {
    // A link is made to a name that is free, and renamed where there is a file.
    std::string own = "/proc/self/fd/" + std::to_string(fd);
    auto link = [&](const std::string &to) {
      return linkat(AT_FDCWD, own.c_str(), AT_FDCWD, to.c_str(),
                    AT_SYMLINK_FOLLOW) == 0;
    };
    if (link(target))
      return;
    name = randomName(target);
    if (errno != EEXIST || !link(name))
      fail("write");
  }
  if (rename(name.c_str(), target.c_str()) != 0) {
    int reason = errno;
    unlink(name.c_str());
    errno = reason;
    fail("rename");
  }
}

LineFile::LineFile(std::string path, size_t kept) : path(std::move(path)) {
  struct stat there{}, behind{};
  bool isLink =
      lstat(this->path.c_str(), &there) == 0 && S_ISLNK(there.st_mode);
  std::string lines; // of the file that a link is replaced by
  if (isLink &&
      (stat(this->path.c_str(), &behind) != 0 || S_ISREG(behind.st_mode))) {
    if (kept > 0)
      lines = readFile(this->path).substr(0, kept);
    unlink(this->path.c_str());
    isLink = false;
  }
  int flags = O_CREAT | O_CLOEXEC | (kept > 0 ? 0 : O_TRUNC);
  std::string error;
  fd = openForWriting(this->path, isLink ? flags : flags | O_NOFOLLOW, error);
  if (fd < 0)
    throw InputError(this->path + ": cannot write: " + error);
  regular = fstat(fd, &there) == 0 && S_ISREG(there.st_mode);
  if (!writeAll(fd, lines))
    throw InputError(this->path + ": cannot write: " + systemError());
  if (kept > 0 && regular &&
      (ftruncate(fd, off_t(kept)) != 0 || lseek(fd, 0, SEEK_END) < 0))
    throw InputError(this->path + ": cannot write: " + systemError());
  bytes = regular ? int64_t(kept) : 0;
}

LineFile::~LineFile() { close(fd); }

void LineFile::append(std::string_view line) {
  if (writeAll(fd, line)) {
    bytes += int64_t(line.size());
    return;
  }
  std::string reason = systemError();
  // Without the part of a line.
  if (regular && ftruncate(fd, bytes) != 0)
    reason += ", and its last line is cut";
  throw RunError(path + ": cannot write: " + reason);
}

} // namespace fsdp::runtime
