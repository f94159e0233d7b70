//===- SafeTensorsFuzz.cpp - the reader of weights and data ---------------===//
#include "Fuzz.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Files/SafeTensors.h"

#include <algorithm>
#include <cstring>

using namespace fsdp;

/// Every tensor that is accepted lies within the file and has the bytes of its
/// shape.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::InputFile file({reinterpret_cast<const char *>(data), size});
  try {
    runtime::SafeTensors tensors(file.path());
    uint64_t sum = 0;
    for (const auto &[name, entry] : tensors.entries()) {
      fuzz::require(int64_t(entry.data.size()) == entry.spec.numBytes(),
                    "expected the bytes of the shape");
      for (std::byte byte : entry.data)
        sum += uint64_t(byte);
    }
    [[maybe_unused]] volatile uint64_t read = sum;
  } catch (const runtime::InputError &error) {
    fuzz::requireMessage(error.what(), file.path() + ": ");
  }
  return 0;
}

/// Changes the header's text, and its length with it.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size,
                                          size_t maxSize, unsigned seed) {
  fuzz::Random random(seed);
  std::string input(reinterpret_cast<char *>(data), size);
  uint64_t length = 0;
  if (size >= 8)
    std::memcpy(&length, input.data(), 8);
  if (size < 8 || length > size - 8) {
    input = fuzz::mutateBytes(std::move(input), random);
  } else {
    std::string header = input.substr(8, length),
                rest = input.substr(8 + length);
    header = fuzz::mutateText(header, header, random);
    length = header.size();
    input = std::string(reinterpret_cast<char *>(&length), 8) + header + rest;
  }
  size = std::min(input.size(), maxSize);
  std::memcpy(data, input.data(), size);
  return size;
}
