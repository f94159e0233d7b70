//===- Support.cpp - what fuzz targets share ------------------------------===//
#include "Fuzz.h"

#include <cstdio>
#include <cstdlib>

#include <sys/mman.h>
#include <unistd.h>

namespace fsdp::fuzz {

void require(bool holds, std::string_view what) {
  if (holds)
    return;
  std::fprintf(stderr, "fuzz: %.*s\n", int(what.size()), what.data());
  std::abort();
}

void requireMessage(std::string_view message, std::string_view origin) {
  require(message.starts_with(origin) && message.size() > origin.size() + 2,
          "expected a message that begins with " + std::string(origin) +
              ", got: " + std::string(message));
}

InputFile::InputFile(std::string_view bytes)
    : descriptor(memfd_create("fuzz", MFD_CLOEXEC)),
      name("/proc/self/fd/" + std::to_string(descriptor)) {
  require(descriptor >= 0 && write(descriptor, bytes.data(), bytes.size()) ==
                                 ssize_t(bytes.size()),
          "no file in memory");
}

InputFile::~InputFile() { close(descriptor); }

} // namespace fsdp::fuzz
