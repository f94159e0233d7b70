//===- TokenFile.cpp - files of token ids ---------------------------------===//
#include "fsdp/Runtime/Files/TokenFile.h"
#include "fsdp/Runtime/Error.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

namespace fsdp::runtime {

using plan::DType;

namespace {

struct FlatHeader {
  int32_t magic, version;
  DType dtype;
};

/// llm.c's, of 256 int32, of which the third is the number of tokens.
constexpr std::array<FlatHeader, 2> kFlatHeaders = {
    {{20240520, 1, DType::UInt16}, {20240801, 7, DType::UInt32}}};
constexpr uint64_t kFlatHeaderBytes = 256 * sizeof(int32_t);

constexpr std::array<char, 9> kIndexMagic = {'M', 'M', 'I', 'D', 'I',
                                             'D', 'X', 0,   0};
constexpr uint64_t kIndexHeaderBytes = 34;

struct IndexHeader {
  uint64_t version, sequences, documentIndices;
  uint8_t dtype;
};

std::optional<DType> indexDType(uint8_t code) {
  switch (code) {
  case 1:
    return DType::UInt8;
  case 2:
    return DType::Int8;
  case 3:
    return DType::Int16;
  case 4:
    return DType::Int32;
  case 5:
    return DType::Int64;
  case 8:
    return DType::UInt16;
  default:
    return std::nullopt;
  }
}

template <typename T>
void readValues(const WatchedFile &file, uint64_t offset, std::span<T> to) {
  file.read(offset, std::as_writable_bytes(to));
}

template <typename T> T readValue(const WatchedFile &file, uint64_t offset) {
  T value{};
  readValues(file, offset, std::span(&value, 1));
  return value;
}

/// The numbers of one of the index's arrays, read in blocks.
template <typename T> class Column {
public:
  Column(const WatchedFile &file, uint64_t offset, uint64_t count)
      : file(file), offset(offset), count(count) {}

  T operator[](uint64_t i) {
    if (i < first || i - first >= block.size()) {
      first = i;
      block.resize(size_t(std::min<uint64_t>(count - i, kBlock)));
      readValues(file, offset + i * sizeof(T), std::span(block));
    }
    return block[size_t(i - first)];
  }

private:
  static constexpr uint64_t kBlock = 1 << 16;

  const WatchedFile &file;
  uint64_t offset, count, first = 0;
  std::vector<T> block;
};

template <typename T>
void widen(const std::vector<std::byte> &from, std::span<int64_t> to) {
  for (size_t i = 0; i < to.size(); ++i) {
    T value{};
    std::memcpy(&value, from.data() + i * sizeof(T), sizeof(T));
    to[i] = int64_t(value);
  }
}

} // namespace

bool isTokenDType(DType dtype) {
  return plan::isInteger(dtype) && dtype != DType::Bool &&
         dtype != DType::UInt64;
}

bool TokenFile::hasHeader(const WatchedFile &file) {
  if (file.size() < sizeof(int32_t))
    return false;
  auto magic = readValue<int32_t>(file, 0);
  return std::any_of(kFlatHeaders.begin(), kFlatHeaders.end(),
                     [&](const FlatHeader &h) { return h.magic == magic; });
}

std::shared_ptr<const TokenFile>
TokenFile::openFlat(const std::string &path, std::optional<DType> dtype) {
  std::shared_ptr<TokenFile> file(new TokenFile(WatchedFile(path)));
  auto fail = [&](const std::string &message) {
    throw InputError(path + ": " + message);
  };
  uint64_t size = file->data.size();
  std::optional<int64_t> said;
  if (hasHeader(file->data)) {
    if (size < kFlatHeaderBytes)
      fail("expected a header of " + std::to_string(kFlatHeaderBytes) +
           " bytes, got a file of " + std::to_string(size));
    std::array<int32_t, 3> head{};
    readValues(file->data, 0, std::span<int32_t>(head));
    const FlatHeader &known =
        *std::find_if(kFlatHeaders.begin(), kFlatHeaders.end(),
                      [&](const FlatHeader &h) { return h.magic == head[0]; });
    if (head[1] != known.version)
      fail("expected version " + std::to_string(known.version) +
           " of a file with magic number " + std::to_string(head[0]) +
           ", got " + std::to_string(head[1]));
    if (dtype && *dtype != known.dtype)
      fail("expected " + std::string(plan::dtypeName(known.dtype)) +
           ", which its header says, got " +
           std::string(plan::dtypeName(*dtype)));
    dtype = known.dtype;
    said = head[2];
    file->begin = kFlatHeaderBytes;
  }
  if (!dtype)
    fail("expected llm.c's header, or the dtype of the tokens after the path "
         "(" +
         path + ":uint16)");
  file->type = *dtype;
  auto width = uint64_t(plan::byteWidth(*dtype));
  uint64_t bytes = size - file->begin;
  if (bytes % width != 0 || bytes == 0)
    fail("expected tokens of " + std::to_string(width) +
         " bytes, at least one, got " + std::to_string(bytes) + " bytes");
  file->count = int64_t(bytes / width);
  if (said && *said != file->count)
    fail("expected " + std::to_string(*said) +
         " tokens, which its header says, got " + std::to_string(file->count));
  return file;
}

std::shared_ptr<const TokenFile>
TokenFile::openMegatron(const std::string &prefix) {
  std::shared_ptr<TokenFile> file(new TokenFile(WatchedFile(prefix + ".bin")));
  file->index.emplace(prefix + ".idx");
  file->readIndex();
  file->checkSequences();
  file->checkDocuments();
  return file;
}

void TokenFile::readIndex() {
  auto fail = [&](const std::string &message) {
    throw InputError(index->path() +
                     ": not an index of Megatron-LM: " + message);
  };
  if (index->size() < kIndexHeaderBytes)
    fail("expected at least " + std::to_string(kIndexHeaderBytes) +
         " bytes, got " + std::to_string(index->size()));
  if (readValue<std::array<char, 9>>(*index, 0) != kIndexMagic)
    fail("expected it to begin with \"MMIDIDX\"");
  auto version = readValue<uint64_t>(*index, 9);
  if (version != 1)
    fail("expected version 1, got " + std::to_string(version));
  auto code = readValue<uint8_t>(*index, 17);
  std::optional<DType> dtype = indexDType(code);
  if (!dtype)
    fail("expected the code of an integer dtype, got " + std::to_string(code));
  type = *dtype;
  auto sequences = readValue<uint64_t>(*index, 18);
  auto documents = readValue<uint64_t>(*index, 26);
  __uint128_t want = kIndexHeaderBytes + __uint128_t(sequences) * 12 +
                     __uint128_t(documents) * 8;
  if (want != index->size()) {
    if (want + sequences == index->size())
      fail("sequences with modes (images) are not supported");
    fail(std::to_string(sequences) + " sequences and " +
         std::to_string(documents) +
         " document indices do not fill the file's " +
         std::to_string(index->size()) + " bytes");
  }
  if (sequences == 0 || documents < 2)
    fail("expected at least one sequence and one document, got " +
         std::to_string(sequences) + " and " +
         std::to_string(documents == 0 ? 0 : documents - 1));
  // Both fit, as the arrays are in the file.
  sequenceCount = int64_t(sequences);
  documentCount = int64_t(documents) - 1;
}

void TokenFile::checkSequences() {
  auto width = uint64_t(plan::byteWidth(type));
  auto sequences = uint64_t(sequenceCount);
  Column<int32_t> lengths(*index, kIndexHeaderBytes, sequences);
  Column<int64_t> pointers(*index, kIndexHeaderBytes + 4 * sequences,
                           sequences);
  uint64_t end = 0;
  for (uint64_t i = 0; i < sequences; ++i) {
    auto fail = [&](const std::string &message) {
      throw InputError(index->path() + ": sequence " + std::to_string(i) +
                       ": " + message);
    };
    int32_t length = lengths[i];
    if (length < 0)
      fail("expected a length, got " + std::to_string(length));
    if (int64_t pointer = pointers[i]; pointer < 0 || uint64_t(pointer) != end)
      fail("expected it at byte " + std::to_string(end) +
           ", where the previous one ends, got " + std::to_string(pointer));
    end += uint64_t(length) * width;
    if (end > data.size())
      fail("expected it within the " + std::to_string(data.size()) +
           " bytes of " + data.path() + ", got byte " + std::to_string(end) +
           " as its end");
  }
  if (end != data.size())
    throw InputError(data.path() + ": expected " + std::to_string(end) +
                     " bytes, which its index says, got " +
                     std::to_string(data.size()));
  count = int64_t(end / width);
  if (count == 0)
    throw InputError(data.path() + ": expected at least one token, got none");
}

void TokenFile::checkDocuments() {
  auto documents = uint64_t(documentCount) + 1;
  Column<int64_t> indices(
      *index, kIndexHeaderBytes + 12 * uint64_t(sequenceCount), documents);
  int64_t before = 0;
  for (uint64_t i = 0; i < documents; ++i) {
    int64_t low = i + 1 == documents ? sequenceCount : before;
    int64_t high = i == 0 ? 0 : sequenceCount;
    int64_t got = indices[i];
    if (got < low || got > high)
      throw InputError(index->path() + ": document index " + std::to_string(i) +
                       ": expected " +
                       (low == high ? std::to_string(low)
                                    : "one from " + std::to_string(low) +
                                          " to " + std::to_string(high)) +
                       ", got " + std::to_string(got));
    before = got;
  }
}

void TokenFile::read(int64_t first, std::span<int64_t> to) const {
  auto width = size_t(plan::byteWidth(type));
  std::vector<std::byte> bytes(to.size() * width);
  data.read(begin + uint64_t(first) * width, bytes);
  switch (type) {
  case DType::UInt8:
    return widen<uint8_t>(bytes, to);
  case DType::Int8:
    return widen<int8_t>(bytes, to);
  case DType::UInt16:
    return widen<uint16_t>(bytes, to);
  case DType::Int16:
    return widen<int16_t>(bytes, to);
  case DType::UInt32:
    return widen<uint32_t>(bytes, to);
  case DType::Int32:
    return widen<int32_t>(bytes, to);
  default:
    return widen<int64_t>(bytes, to);
  }
}

int64_t TokenFile::documentBegin(int64_t document) const {
  if (document == documentCount)
    return count;
  uint64_t sequences = uint64_t(sequenceCount);
  auto sequence = readValue<int64_t>(
      *index, kIndexHeaderBytes + 12 * sequences + 8 * uint64_t(document));
  if (sequence == sequenceCount)
    return count; // of an empty one at the end
  return readValue<int64_t>(*index, kIndexHeaderBytes + 4 * sequences +
                                        8 * uint64_t(sequence)) /
         plan::byteWidth(type);
}

void TokenFile::eachDocument(
    const std::function<void(int64_t begin)> &visit) const {
  auto sequences = uint64_t(sequenceCount);
  Column<int64_t> pointers(*index, kIndexHeaderBytes + 4 * sequences,
                           sequences);
  Column<int64_t> indices(*index, kIndexHeaderBytes + 12 * sequences,
                          uint64_t(documentCount));
  for (int64_t i = 0; i < documentCount; ++i) {
    int64_t sequence = indices[uint64_t(i)];
    visit(sequence == sequenceCount
              ? count
              : pointers[uint64_t(sequence)] / plan::byteWidth(type));
  }
  visit(count);
}

std::string TokenFile::fingerprint() const {
  return std::string(plan::dtypeName(type)) + " " + std::to_string(begin) +
         " " + data.sampledHash() + (index ? " " + index->sampledHash() : "");
}

std::vector<std::string> TokenFile::paths() const {
  std::vector<std::string> paths = {data.path()};
  if (index)
    paths.push_back(index->path());
  return paths;
}

std::string TokenFile::describe() const {
  std::string text = std::string(plan::dtypeName(type)) + ", " +
                     std::to_string(count) + " tokens";
  if (index)
    text += " in " + std::to_string(documentCount) + " documents";
  return text;
}

} // namespace fsdp::runtime
