//===- TokensFuzz.cpp - the readers of token files ------------------------===//
//
// An input is Megatron's index, then what lies in the .bin: the index is as
// long as its counts say, or all of the input.
//
//===----------------------------------------------------------------------===//
#include "Fuzz.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Files/TokenFile.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <vector>

#include <unistd.h>

using namespace fsdp;
using runtime::TokenFile;

namespace {

/// A folder for the pair, in memory where there is one.
class Folder {
public:
  Folder() {
    std::string name = "fsdp-fuzz-tokens-" + std::to_string(getpid());
    std::error_code error;
    path = std::filesystem::is_directory("/dev/shm", error)
               ? std::filesystem::path("/dev/shm")
               : std::filesystem::temp_directory_path();
    path /= name;
    std::filesystem::create_directories(path);
  }
  ~Folder() {
    std::error_code error;
    std::filesystem::remove_all(path, error);
  }
  void write(const std::string &name, std::string_view bytes) const {
    std::ofstream(path / name, std::ios::binary) << bytes;
  }
  std::string operator/(const std::string &name) const { return path / name; }

private:
  std::filesystem::path path;
};

/// All tokens can be read, and documents lie in them in order.
void requireWhole(const TokenFile &file) {
  fuzz::require(file.tokens() > 0, "expected tokens");
  std::vector<int64_t> tokens(size_t(file.tokens()));
  file.read(0, tokens);
  int64_t before = 0, documents = 0;
  if (file.documents() > 0)
    file.eachDocument([&](int64_t begin) {
      fuzz::require(begin >= before && begin <= file.tokens(),
                    "expected documents in order");
      fuzz::require(begin == file.documentBegin(documents++),
                    "expected the same begin again");
      before = begin;
    });
  fuzz::require(file.documents() == 0 || before == file.tokens(),
                "expected the last document to end with the tokens");
}

template <typename OpenT>
void attempt(const std::string &origin, const OpenT &open) {
  std::shared_ptr<const TokenFile> file;
  try {
    file = open();
  } catch (const runtime::InputError &error) {
    fuzz::requireMessage(error.what(), origin);
    return;
  }
  requireWhole(*file);
}

/// The index's bytes by its own counts, at most all.
size_t indexBytes(std::string_view text) {
  uint64_t sequences = 0, documents = 0;
  if (text.size() < 34)
    return text.size();
  std::memcpy(&sequences, text.data() + 18, 8);
  std::memcpy(&documents, text.data() + 26, 8);
  __uint128_t bytes =
      34 + __uint128_t(sequences) * 12 + __uint128_t(documents) * 8;
  return size_t(std::min<__uint128_t>(bytes, text.size()));
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const Folder folder;
  std::string_view text(reinterpret_cast<const char *>(data), size);
  size_t index = indexBytes(text);
  folder.write("m.idx", text.substr(0, index));
  folder.write("m.bin", text.substr(index));
  attempt(folder / "m.", [&] { return TokenFile::openMegatron(folder / "m"); });
  folder.write("flat", text);
  attempt(folder / "flat: ",
          [&] { return TokenFile::openFlat(folder / "flat", std::nullopt); });
  attempt(folder / "flat: ", [&] {
    return TokenFile::openFlat(folder / "flat", plan::DType::UInt16);
  });
  return 0;
}

/// Puts an extreme, or a small, number in one of the index's fields, or changes
/// any bytes.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size,
                                          size_t maxSize, unsigned seed) {
  fuzz::Random random(seed);
  std::string input(reinterpret_cast<char *>(data), size);
  if (size < 42 || random.oneIn(3)) {
    input = fuzz::mutateBytes(std::move(input), random);
  } else {
    constexpr int64_t kNumbers[] = {0,         1,         2,         3,
                                    7,         -1,        INT32_MAX, INT32_MIN,
                                    INT64_MAX, INT64_MIN, 1LL << 32, 1LL << 61};
    int64_t number = kNumbers[random.below(std::size(kNumbers))];
    size_t field = random.below(4);
    size_t width = field == 1 ? 1 : random.oneIn(2) ? 4 : 8;
    size_t at = field == 0   ? 9 // the version
                : field == 1 ? 17
                : field == 2 ? 18 + 8 * random.below(2)
                             : 34 + 4 * random.below((size - 38) / 4);
    width = std::min(width, size - at);
    std::memcpy(input.data() + at, &number, width);
  }
  size = std::min(input.size(), maxSize);
  std::memcpy(data, input.data(), size);
  return size;
}
