//===- CaptureFuzz.cpp - the reader of model.pt ---------------------------===//
#include "Fuzz.h"
#include "fsdp/Import/Capture.h"

#include <caffe2/serialize/inline_container.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <sstream>

using namespace fsdp;

/// What is accepted has numbered values: every call's results, in order.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::InputFile file({reinterpret_cast<const char *>(data), size});
  try {
    Capture capture = readCapture(file.path());
    for (const CapturedCall &call : capture.calls)
      fuzz::require(call.outs.size() == call.outValues.size() &&
                        call.outs.size() == call.views.size(),
                    "expected a value and a view of each result");
  } catch (const CaptureError &error) {
    fuzz::requireMessage(error.what(), file.path() + ": ");
  }
  return 0;
}

namespace {
constexpr std::array<const char *, 4> kRecords = {"capture.json", "graph.ir",
                                                  "init.ir", "eval.ir"};

/// The records that are there; throws for what is no archive.
std::map<std::string, std::string> unpack(std::string_view bytes) {
  std::istringstream stream{std::string(bytes)};
  caffe2::serialize::PyTorchStreamReader reader(&stream);
  std::map<std::string, std::string> records;
  for (const char *name : kRecords)
    if (reader.hasRecord(std::string("extra/") + name)) {
      auto [data, size] = reader.getRecord(std::string("extra/") + name);
      records[name] = {static_cast<const char *>(data.get()), size};
    }
  return records;
}

std::string pack(const std::map<std::string, std::string> &records) {
  std::string bytes;
  caffe2::serialize::PyTorchStreamWriter writer(
      [&](const void *data, size_t size) {
        bytes.append(static_cast<const char *>(data), size);
        return size;
      });
  for (const auto &[name, text] : records)
    writer.writeRecord("extra/" + name, text.data(), text.size());
  writer.writeEndOfFile();
  return bytes;
}
} // namespace

/// Changes the text of one record.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size,
                                          size_t maxSize, unsigned seed) {
  fuzz::Random random(seed);
  std::string input(reinterpret_cast<char *>(data), size);
  try {
    std::map<std::string, std::string> records = unpack(input);
    if (!records.empty()) {
      auto it = std::next(records.begin(), long(random.below(records.size())));
      it->second = fuzz::mutateText(it->second, it->second, random);
      input = pack(records);
    }
  } catch (const std::exception &) {
    input = fuzz::mutateBytes(std::move(input), random);
  }
  size = std::min(input.size(), maxSize);
  std::memcpy(data, input.data(), size);
  return size;
}
