//===- ManifestFuzz.cpp - the reader of manifests of checkpoints ----------===//
#include "Fuzz.h"
#include "fsdp/Runtime/Checkpoint/Manifest.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Support/Hash.h"

using namespace fsdp;
using namespace fsdp::runtime;

/// An input is what follows the hash, which is made here. What is accepted is
/// written and read again as the same manifest.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  std::string rest(reinterpret_cast<const char *>(data), size);
  std::string text = "{\"hash\": \"" + fsdp::hashBytes(rest) + "\",\n" + rest;
  Manifest manifest;
  try {
    manifest = parseManifest(text, "manifest.json");
  } catch (const InputError &error) {
    fuzz::requireMessage(error.what(), "manifest.json: ");
    return 0;
  }
  std::string printed = printManifest(manifest);
  fuzz::require(printManifest(parseManifest(printed, "printed")) == printed,
                "expected the same manifest when it is read again");
  return 0;
}
