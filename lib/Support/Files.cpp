//===- Files.cpp - whole files, read and written --------------------------===//
#include "fsdp/Support/Outputs.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

namespace fsdp {

namespace {

/// The limit for what is not a regular file, such as a device, which may have
/// no end.
constexpr uint64_t kMaxStreamBytes = uint64_t(64) << 20;

class Descriptor {
public:
  explicit Descriptor(int number) : number(number) {}
  Descriptor(const Descriptor &) = delete;
  Descriptor &operator=(const Descriptor &) = delete;
  ~Descriptor() {
    if (number >= 0)
      close(number);
  }
  /// False with errno if what is written does not arrive.
  bool finish() { return close(std::exchange(number, -1)) == 0; }

  int number;
};

std::string failed(const char *action) {
  return "cannot be " + std::string(action) + ": " + std::strerror(errno);
}

/// False with errno where not all of it could be written.
bool writeAll(int file, std::string_view text) {
  while (!text.empty()) {
    ssize_t written = write(file, text.data(), text.size());
    if (written < 0 && errno == EINTR)
      continue;
    if (written < 0)
      return false;
    text.remove_prefix(size_t(written));
  }
  return true;
}

} // namespace

std::string readFile(const std::string &path, uint64_t maxBytes,
                     std::string &text, int waitSeconds) {
  // Opening a pipe would wait for a writer.
  Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat info{};
  if (file.number < 0 || fstat(file.number, &info) != 0)
    return failed("read");
  if (S_ISREG(info.st_mode)) {
    if (uint64_t(info.st_size) <= maxBytes)
      text.reserve(size_t(info.st_size));
  } else {
    maxBytes = std::min(maxBytes, kMaxStreamBytes);
  }
  text.clear();
  auto waitForData = [&](int milliseconds) {
    pollfd entry{file.number, POLLIN, 0};
    return poll(&entry, 1, milliseconds) != 0;
  };
  if (S_ISFIFO(info.st_mode) && !waitForData(waitSeconds * 1000))
    return "cannot be read: a pipe that nobody writes to";
  std::array<char, 1 << 16> buffer;
  for (;;) {
    ssize_t count = read(file.number, buffer.data(), buffer.size());
    if (count == 0)
      return "";
    if (count < 0 && errno == EAGAIN)
      waitForData(-1); // who writes has it open
    else if (count < 0 && errno != EINTR)
      return failed("read");
    if (count <= 0)
      continue;
    if (text.size() + size_t(count) > maxBytes)
      return "expected at most " + std::to_string(maxBytes) +
             " bytes, got more";
    text.append(buffer.data(), size_t(count));
  }
}

std::string writeFile(const std::string &path, std::string_view text) {
  struct stat info{};
  bool exists = stat(path.c_str(), &info) == 0;
  if (exists && S_ISDIR(info.st_mode)) {
    errno = EISDIR;
    return failed("written");
  }
  // What /dev and /proc name may be the file that an output was sent to.
  if (exists && (!S_ISREG(info.st_mode) || path.starts_with("/dev/") ||
                 path.starts_with("/proc/"))) {
    std::string error;
    Descriptor file(openForWriting(path, O_TRUNC | O_CLOEXEC, error));
    if (file.number < 0)
      return "cannot be written: " + error;
    if (!writeAll(file.number, text) || !file.finish())
      return failed("written");
    return "";
  }
  // A link stays one, its file gets the text.
  std::string target = path;
  if (char *resolved = realpath(path.c_str(), nullptr)) {
    target = resolved;
    free(resolved);
  }
  std::string temporary = target + ".tmp." + std::to_string(getpid());
  // Not through a link that somebody has put there.
  Descriptor file(open(temporary.c_str(),
                       O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC,
                       exists ? info.st_mode & 0777 : 0666));
  if (file.number < 0)
    return failed("written");
  if (!writeAll(file.number, text) || !file.finish() ||
      rename(temporary.c_str(), target.c_str()) != 0) {
    std::string error = failed("written");
    unlink(temporary.c_str());
    return error;
  }
  return "";
}

} // namespace fsdp
