//===- Outputs.cpp - where programs write ---------------------------------===//
#include "fsdp/Support/Outputs.h"

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <thread>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace fsdp {

namespace {

constexpr auto kPause = std::chrono::milliseconds(10);

/// Whether writing to `output` would replace what is, or will be, at `other`.
bool isSameFile(const std::string &output, const std::string &other) {
  struct stat a{}, b{};
  bool isThere = stat(output.c_str(), &a) == 0;
  if (isThere != (stat(other.c_str(), &b) == 0))
    return false;
  if (isThere)
    return S_ISREG(a.st_mode) && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
  std::error_code error;
  auto resolved = [&](const std::string &path) {
    return std::filesystem::weakly_canonical(
        std::filesystem::absolute(path, error), error);
  };
  return resolved(output) == resolved(other) && !error;
}

} // namespace

void reserveStandardStreams() {
  for (int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (fcntl(stream, F_GETFD) < 0 && errno == EBADF)
      // The lowest free number is this one.
      (void)open("/dev/null", stream == STDIN_FILENO ? O_WRONLY : O_RDONLY);
}

int openForWriting(const std::string &path, int flags, std::string &error,
                   int waitSeconds) {
  auto end =
      std::chrono::steady_clock::now() + std::chrono::seconds(waitSeconds);
  for (;;) {
    // Opening a pipe would wait for a reader.
    int file = open(path.c_str(), O_WRONLY | O_NONBLOCK | flags, 0666);
    if (file >= 0) {
      fcntl(file, F_SETFL, fcntl(file, F_GETFL) & ~O_NONBLOCK);
      return file;
    }
    int reason = errno;
    struct stat info{};
    bool isUnread = reason == ENXIO && stat(path.c_str(), &info) == 0 &&
                    S_ISFIFO(info.st_mode);
    if (!isUnread || std::chrono::steady_clock::now() >= end) {
      error = isUnread ? "a pipe that nobody reads" : std::strerror(reason);
      return -1;
    }
    std::this_thread::sleep_for(kPause);
  }
}

std::string checkOutputs(const std::vector<NamedFile> &outputs,
                         const std::vector<NamedFile> &inputs) {
  auto clash = [](const NamedFile &a, const NamedFile &b) {
    return a.name + " and " + b.name +
           ": expected two files, got one: " + a.path;
  };
  for (size_t i = 0; i < outputs.size(); ++i) {
    for (const NamedFile &input : inputs)
      if (isSameFile(outputs[i].path, input.path))
        return clash(outputs[i], input);
    for (size_t j = 0; j < i; ++j)
      if (isSameFile(outputs[i].path, outputs[j].path))
        return clash(outputs[j], outputs[i]);
  }
  return "";
}

} // namespace fsdp
