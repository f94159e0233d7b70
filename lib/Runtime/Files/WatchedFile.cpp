//===- WatchedFile.cpp - a file that must not change under a run ----------===//
#include "fsdp/Runtime/Files/WatchedFile.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Files/SafeTensors.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

namespace fsdp::runtime {

namespace {

constexpr size_t kBlock = 4096;
constexpr uint64_t kBlocks = 64;

std::string systemError() { return std::strerror(errno); }

} // namespace

WatchedFile::WatchedFile(std::string path) : name(std::move(path)) {
  // Not to wait for the writer of a pipe.
  fd = open(name.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0)
    throw InputError(name + ": cannot open: " + systemError());
  if (fstat(fd, &opened) == 0 && S_ISREG(opened.st_mode))
    return;
  close(fd);
  throw InputError(name + ": expected a regular file");
}

WatchedFile::WatchedFile(WatchedFile &&other) noexcept
    : name(std::move(other.name)), fd(std::exchange(other.fd, -1)),
      opened(other.opened) {}

WatchedFile::~WatchedFile() {
  if (fd >= 0)
    close(fd);
}

void WatchedFile::read(uint64_t offset, std::span<std::byte> to) const {
  readAll(offset, to);
  check();
}

void WatchedFile::readAll(uint64_t offset, std::span<std::byte> to) const {
  while (!to.empty()) {
    ssize_t done = pread(fd, to.data(), to.size(), off_t(offset));
    if (done < 0 && errno == EINTR)
      continue;
    if (done < 0)
      throw RunError(name + ": cannot read " + std::to_string(to.size()) +
                     " bytes at byte " + std::to_string(offset) + ": " +
                     systemError());
    if (done == 0) {
      check();
      throw RunError(name + ": expected " + std::to_string(to.size()) +
                     " bytes at byte " + std::to_string(offset) +
                     ", got the end of the file");
    }
    offset += uint64_t(done);
    to = to.subspan(size_t(done));
  }
}

void WatchedFile::check() const {
  struct stat now{};
  if (fstat(fd, &now) != 0)
    throw RunError(name + ": cannot stat: " + systemError());
  if (now.st_size != opened.st_size)
    throw RunError(name + ": changed while the run reads it: expected " +
                   std::to_string(opened.st_size) + " bytes, got " +
                   std::to_string(now.st_size));
  if (now.st_mtim.tv_sec != opened.st_mtim.tv_sec ||
      now.st_mtim.tv_nsec != opened.st_mtim.tv_nsec)
    throw RunError(name + ": changed while the run reads it: it was written to "
                          "after it was opened");
}

std::string WatchedFile::hash() const {
  HashState state;
  std::vector<std::byte> block(size_t(1) << 20);
  for (uint64_t at = 0; at < size(); at += block.size()) {
    std::span<std::byte> part(
        block.data(), size_t(std::min<uint64_t>(block.size(), size() - at)));
    readAll(at, part);
    state.add(part);
  }
  check();
  return state.text();
}

std::string WatchedFile::sampledHash() const {
  std::vector<std::byte> bytes(
      size_t(std::min<uint64_t>(size(), kBlocks * kBlock)));
  if (bytes.size() < kBlocks * kBlock) {
    readAll(0, bytes);
  } else {
    uint64_t last = size() - kBlock;
    for (uint64_t i = 0; i < kBlocks; ++i)
      // Without overflow: kBlocks times a file's size fits.
      readAll(uint64_t(__uint128_t(last) * i / (kBlocks - 1)),
              {bytes.data() + i * kBlock, kBlock});
  }
  check();
  HashState state;
  uint64_t length = size();
  state.add(std::as_bytes(std::span(&length, 1)));
  state.add(bytes);
  return state.text();
}

} // namespace fsdp::runtime
