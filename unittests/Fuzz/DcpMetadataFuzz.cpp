//===- DcpMetadataFuzz.cpp - the reader of .metadata ----------------------===//
#include "Fuzz.h"
#include "PickleMutate.h"
#include "fsdp/Runtime/Checkpoint/DcpMetadata.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Support/Hash.h"

#include <algorithm>
#include <cstring>

using namespace fsdp;

namespace {
/// Of what ends the metadata that are written here.
constexpr std::string_view kHash = "xxh3:";
constexpr size_t kHashBytes = 37;
constexpr std::string_view kPath = "folder/.metadata";

runtime::DcpMetadata read(std::string_view text) {
  return runtime::readDcpMetadata(std::string(kPath),
                                  std::as_bytes(std::span(text)));
}
} // namespace

/// What is accepted names files of the folder, and is the same when it is
/// written and read again.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  try {
    runtime::DcpMetadata metadata =
        read({reinterpret_cast<const char *>(data), size});
    for (const auto &[name, tensor] : metadata.tensors)
      for (const auto &[chunk, place] : tensor.chunks)
        fuzz::require(!place.file.empty() && place.file[0] != '.' &&
                          place.file.find('/') == std::string::npos,
                      "expected a file in the folder");
    std::string written = writeDcpMetadata(metadata);
    runtime::DcpMetadata again = read(written);
    fuzz::require(writeDcpMetadata(again) == written,
                  "expected the same metadata again");
  } catch (const runtime::InputError &error) {
    fuzz::requireMessage(error.what(), std::string(kPath) + ": ");
  }
  return 0;
}

/// Changes the pickle, and the hash behind it with it.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size,
                                          size_t maxSize, unsigned seed) {
  fuzz::Random random(seed);
  std::string_view input(reinterpret_cast<char *>(data), size);
  bool hashed =
      size >= kHashBytes && input.substr(size - kHashBytes).starts_with(kHash);
  std::string pickle = fuzz::mutatePickle(
      input.substr(0, hashed ? size - kHashBytes : size), random);
  if (hashed)
    pickle += hashBytes(pickle);
  size = std::min(pickle.size(), maxSize);
  std::memcpy(data, pickle.data(), size);
  return size;
}
