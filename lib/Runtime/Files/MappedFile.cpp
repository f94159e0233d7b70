//===- MappedFile.cpp - a file as memory ----------------------------------===//
#include "fsdp/Runtime/Files/MappedFile.h"
#include "fsdp/Runtime/Error.h"

#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace fsdp::runtime {

MappedFile::MappedFile(const std::string &path) {
  int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0)
    throw InputError(path + ": cannot open: " + std::strerror(errno));
  struct stat info{};
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    close(fd);
    throw InputError(path + ": expected a regular file");
  }
  auto size = size_t(info.st_size);
  // Nothing cannot be mapped.
  void *mapped =
      size ? mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0) : nullptr;
  int reason = errno;
  close(fd);
  if (mapped == MAP_FAILED)
    throw InputError(path + ": cannot map: " + std::strerror(reason));
  memory = {static_cast<const std::byte *>(mapped), size};
}

MappedFile::~MappedFile() {
  if (!memory.empty())
    munmap(const_cast<std::byte *>(memory.data()), memory.size());
}

} // namespace fsdp::runtime
