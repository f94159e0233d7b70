//===- TorchItemFuzz.cpp - the reader of torch.save's archives ------------===//
#include "Fuzz.h"
#include "PickleMutate.h"
#include "fsdp/Runtime/Checkpoint/StoredZip.h"
#include "fsdp/Runtime/Checkpoint/TorchItems.h"
#include "fsdp/Runtime/Error.h"

#include <algorithm>
#include <cstring>

using namespace fsdp;

namespace {
constexpr std::string_view kPlace = "file: item";

/// Whether `accept` accepts the input.
template <typename Accept> void give(Accept &&accept) {
  try {
    accept();
  } catch (const runtime::InputError &error) {
    fuzz::requireMessage(error.what(), std::string(kPlace) + ": ");
  }
}

/// The item again, as it is written here.
template <typename Write> std::string written(Write &&write) {
  std::string item;
  write([&](std::string_view bytes) { item += bytes; });
  return item;
}
} // namespace

/// A tensor has the bytes of its shape, and a value is the same when it is
/// written and read again.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  std::span item(reinterpret_cast<const std::byte *>(data), size);
  std::string place(kPlace);
  give([&] {
    runtime::TorchTensor tensor = runtime::readTorchTensor(place, item);
    fuzz::require(int64_t(tensor.data.size()) == tensor.spec.numBytes(),
                  "expected the bytes of the shape");
    std::string again = written([&](auto &&write) {
      runtime::writeTorchTensor(tensor.spec, tensor.data, write);
    });
    runtime::TorchTensor same =
        runtime::readTorchTensor(place, std::as_bytes(std::span(again)));
    fuzz::require(same.spec == tensor.spec &&
                      std::equal(same.data.begin(), same.data.end(),
                                 tensor.data.begin(), tensor.data.end()),
                  "expected the same tensor again");
  });
  give([&] {
    nlohmann::json value = runtime::readTorchValue(place, item);
    std::string again = written(
        [&](auto &&write) { runtime::writeTorchValue(value, true, write); });
    nlohmann::json same =
        runtime::readTorchValue(place, std::as_bytes(std::span(again)));
    using Handler = nlohmann::json::error_handler_t;
    fuzz::require(same.dump(-1, ' ', false, Handler::replace) ==
                      value.dump(-1, ' ', false, Handler::replace),
                  "expected the same value again");
  });
  return 0;
}

/// Changes the pickle in the archive, or a record's bytes.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size,
                                          size_t maxSize, unsigned seed) {
  fuzz::Random random(seed);
  std::string input(reinterpret_cast<char *>(data), size);
  try {
    std::vector<std::pair<std::string, std::string>> records;
    for (auto [name, bytes] :
         runtime::readStoredZip("", std::as_bytes(std::span(input))))
      if (name != "version" && name != ".data/serialization_id")
        records.emplace_back(
            name, std::string(reinterpret_cast<const char *>(bytes.data()),
                              bytes.size()));
    for (auto &[name, bytes] : records)
      if (name == "data.pkl" ? !random.oneIn(8) : random.oneIn(16))
        bytes = name == "data.pkl" ? fuzz::mutatePickle(bytes, random)
                                   : fuzz::mutateBytes(bytes, random);
    std::vector<runtime::ZipRecord> zip;
    for (const auto &[name, bytes] : records)
      zip.push_back({name, bytes});
    input = written([&](auto &&write) { runtime::writeStoredZip(zip, write); });
  } catch (const runtime::InputError &) {
    input = fuzz::mutateBytes(std::move(input), random);
  }
  size = std::min(input.size(), maxSize);
  std::memcpy(data, input.data(), size);
  return size;
}
