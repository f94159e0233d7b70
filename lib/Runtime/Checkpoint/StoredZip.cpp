//===- StoredZip.cpp - the archives that torch.save writes ----------------===//
#include "fsdp/Runtime/Checkpoint/StoredZip.h"
#include "fsdp/Runtime/Error.h"

#include <caffe2/serialize/inline_container.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <optional>
#include <utility>

#include <endian.h>

// It defines functions, and LibTorch has them under the same names.
namespace fsdp::runtime::crc {
#include <caffe2/serialize/crc_alt.h>
} // namespace fsdp::runtime::crc

namespace fsdp::runtime {

namespace {

/// Numbers that stand in 64 bits elsewhere.
constexpr uint32_t kElsewhere = UINT32_MAX;
constexpr uint32_t kLocal = 0x04034b50, kDescriptor = 0x08074b50,
                   kCentral = 0x02014b50, kEnd64 = 0x06064b50,
                   kLocator = 0x07064b50, kEnd = 0x06054b50;
/// Names are UTF-8; size and CRC follow the data.
constexpr uint16_t kUtf8 = 1 << 11, kHasDescriptor = 1 << 3;
constexpr uint16_t kZip64Field = 1, kPaddingField = 0x4246;
constexpr size_t kEnd64Bytes = 56, kLocatorBytes = 20, kEndBytes = 22;

struct Entry {
  std::string_view name;
  uint16_t flags = 0;
  uint32_t crc = 0;
  uint64_t size = 0, offset = 0;
};

/// Reads an archive from a position on.
class Cursor {
public:
  Cursor(const std::string &place, std::string_view bytes)
      : place(place), bytes(bytes) {}

  uint64_t at = 0;

  [[noreturn]] void fail(const std::string &message) const {
    throw InputError(place + ": damaged: " + message + " at byte " +
                     std::to_string(at) + " of its archive");
  }

  std::string_view take(uint64_t size) {
    if (size > bytes.size() - at)
      fail("expected " + std::to_string(size) + " more bytes, got " +
           std::to_string(bytes.size() - at));
    at += size;
    return bytes.substr(at - size, size);
  }

  /// Little-endian, as all numbers of a zip are.
  template <typename Number> Number number() {
    Number value = 0;
    std::string_view part = take(sizeof(Number));
    for (size_t i = sizeof(Number); i-- > 0;)
      value = Number(uint64_t(value) << 8 | uint8_t(part[i]));
    return value;
  }

  template <typename Number> void expect(uint64_t want, const char *what) {
    uint64_t start = at;
    if (Number got = number<Number>(); got != want) {
      at = start;
      fail("expected " + std::string(what) + " " + std::to_string(want) +
           ", got " + std::to_string(got));
    }
  }

private:
  const std::string &place;
  std::string_view bytes;
};

/// What a record's two headers have in common, from the version on.
Entry readVersionAndFlags(Cursor &cursor) {
  Entry entry;
  cursor.expect<uint16_t>(0, "version");
  entry.flags = cursor.number<uint16_t>();
  if ((entry.flags & ~kHasDescriptor) != kUtf8)
    cursor.fail("unexpected flags " + std::to_string(entry.flags));
  cursor.expect<uint16_t>(0, "method");
  cursor.expect<uint32_t>(0, "time");
  return entry;
}

Entry readCentral(Cursor &cursor) {
  cursor.expect<uint32_t>(kCentral, "signature");
  cursor.expect<uint16_t>(0, "origin");
  Entry entry = readVersionAndFlags(cursor);
  entry.crc = cursor.number<uint32_t>();
  auto packed = cursor.number<uint32_t>();
  cursor.expect<uint32_t>(packed, "size");
  auto nameBytes = cursor.number<uint16_t>(),
       extraBytes = cursor.number<uint16_t>();
  cursor.expect<uint16_t>(0, "comment");
  cursor.expect<uint16_t>(0, "disk");
  cursor.expect<uint16_t>(0, "attributes");
  cursor.expect<uint32_t>(0, "attributes");
  auto offset = cursor.number<uint32_t>();
  entry.name = cursor.take(nameBytes);
  entry.size = packed;
  entry.offset = offset;
  bool wideSize = packed == kElsewhere, wideOffset = offset == kElsewhere;
  unsigned fieldBytes = (wideSize ? 16 : 0) + (wideOffset ? 8 : 0);
  if (extraBytes != (fieldBytes ? fieldBytes + 4 : 0))
    cursor.fail("unexpected extra field");
  if (fieldBytes) {
    cursor.expect<uint16_t>(kZip64Field, "field");
    cursor.expect<uint16_t>(fieldBytes, "field of bytes");
  }
  if (wideSize) {
    entry.size = cursor.number<uint64_t>();
    cursor.expect<uint64_t>(entry.size, "size");
  }
  if (wideOffset)
    entry.offset = cursor.number<uint64_t>();
  return entry;
}

/// Of the local header: the numbers again, where it is too large for 32 bits,
/// and the padding.
void checkLocalExtra(Cursor &cursor, const Entry &entry, uint16_t extraBytes) {
  uint64_t end = cursor.at + extraBytes;
  auto field = cursor.number<uint16_t>();
  auto fieldBytes = cursor.number<uint16_t>();
  bool wideSize = entry.size >= kElsewhere,
       wideOffset = entry.offset >= kElsewhere;
  if (wideSize || wideOffset) {
    if (field != kZip64Field ||
        fieldBytes != (wideSize ? 16 : 0) + (wideOffset ? 8 : 0))
      cursor.fail("unexpected field of " + std::to_string(fieldBytes) +
                  " bytes");
    // The writer may not know a size that follows the data.
    for (int i = 0; wideSize && i < 2; ++i)
      if (auto size = cursor.number<uint64_t>();
          size != 0 && size != entry.size)
        cursor.fail("unexpected size");
    if (wideOffset)
      cursor.expect<uint64_t>(entry.offset, "offset");
    field = cursor.number<uint16_t>();
    fieldBytes = cursor.number<uint16_t>();
  }
  if (field != kPaddingField || cursor.at + fieldBytes != end)
    cursor.fail("expected a padding");
  std::string_view padding = cursor.take(fieldBytes);
  if (padding.find_first_not_of('Z') != std::string_view::npos)
    cursor.fail("expected a padding of Z");
}

std::string_view readRecord(Cursor &cursor, const Entry &entry) {
  if (cursor.at != entry.offset)
    cursor.fail("expected a record at " + std::to_string(entry.offset));
  cursor.expect<uint32_t>(kLocal, "signature");
  Entry local = readVersionAndFlags(cursor);
  if (local.flags != entry.flags)
    cursor.fail("unexpected flags " + std::to_string(local.flags));
  bool follows = entry.flags & kHasDescriptor;
  // Then both sizes have 64 bits.
  bool wide = entry.size >= kElsewhere || entry.offset >= kElsewhere;
  cursor.expect<uint32_t>(follows ? 0 : entry.crc, "CRC");
  for (int i = 0; i < 2; ++i)
    cursor.expect<uint32_t>(follows ? 0 : uint32_t(entry.size), "size");
  cursor.expect<uint16_t>(entry.name.size(), "name of bytes");
  auto extraBytes = cursor.number<uint16_t>();
  if (cursor.take(entry.name.size()) != entry.name)
    cursor.fail("expected the name \"" + std::string(entry.name) + "\"");
  checkLocalExtra(cursor, entry, extraBytes);
  std::string_view data = cursor.take(entry.size);
  if (uint32_t got = crc::crc32_fast(data.data(), data.size());
      got != entry.crc)
    cursor.fail("\"" + std::string(entry.name) +
                "\" does not match its CRC-32:");
  if (follows) {
    cursor.expect<uint32_t>(kDescriptor, "signature");
    cursor.expect<uint32_t>(entry.crc, "CRC");
    for (int i = 0; i < 2; ++i)
      if (wide)
        cursor.expect<uint64_t>(entry.size, "size");
      else
        cursor.expect<uint32_t>(entry.size, "size");
  }
  return data;
}

/// What stands behind the records, twice as 64 bits and less.
struct Directory {
  uint64_t entries = 0, bytes = 0, offset = 0;
};

Directory readEnd(Cursor &cursor, uint64_t archiveBytes) {
  constexpr size_t kTail = kEnd64Bytes + kLocatorBytes + kEndBytes;
  if (archiveBytes < kTail)
    cursor.fail("expected an archive of at least " + std::to_string(kTail) +
                " bytes, got " + std::to_string(archiveBytes));
  uint64_t start = cursor.at = archiveBytes - kTail;
  Directory directory;
  cursor.expect<uint32_t>(kEnd64, "signature");
  cursor.expect<uint64_t>(kEnd64Bytes - 12, "size");
  // Made by version 3.0 on Unix; readable from version 4.5 on.
  cursor.expect<uint16_t>(0x031e, "origin");
  cursor.expect<uint16_t>(0x002d, "version");
  cursor.expect<uint32_t>(0, "disk");
  cursor.expect<uint32_t>(0, "disk");
  directory.entries = cursor.number<uint64_t>();
  cursor.expect<uint64_t>(directory.entries, "records");
  directory.bytes = cursor.number<uint64_t>();
  directory.offset = cursor.number<uint64_t>();
  if (directory.offset > start || directory.bytes != start - directory.offset)
    cursor.fail("expected a directory before");
  cursor.expect<uint32_t>(kLocator, "signature");
  cursor.expect<uint32_t>(0, "disk");
  cursor.expect<uint64_t>(start, "offset");
  cursor.expect<uint32_t>(1, "disks");
  cursor.expect<uint32_t>(kEnd, "signature");
  cursor.expect<uint16_t>(0, "disk");
  cursor.expect<uint16_t>(0, "disk");
  for (int i = 0; i < 2; ++i)
    cursor.expect<uint16_t>(std::min<uint64_t>(directory.entries, UINT16_MAX),
                            "records");
  cursor.expect<uint32_t>(std::min<uint64_t>(directory.bytes, kElsewhere),
                          "bytes");
  cursor.expect<uint32_t>(std::min<uint64_t>(directory.offset, kElsewhere),
                          "offset");
  cursor.expect<uint16_t>(0, "comment");
  return directory;
}

} // namespace

std::map<std::string, std::span<const std::byte>>
readStoredZip(const std::string &place, std::span<const std::byte> bytes) {
  std::string_view text(reinterpret_cast<const char *>(bytes.data()),
                        bytes.size());
  Cursor cursor(place, text);
  Directory directory = readEnd(cursor, bytes.size());
  std::vector<Entry> entries;
  cursor.at = directory.offset;
  while (cursor.at < directory.offset + directory.bytes)
    entries.push_back(readCentral(cursor));
  if (cursor.at != directory.offset + directory.bytes ||
      entries.size() != directory.entries)
    cursor.fail("expected a directory of " + std::to_string(directory.entries) +
                " records");
  std::map<std::string, std::span<const std::byte>> records;
  cursor.at = 0;
  for (const Entry &entry : entries) {
    std::string_view data = readRecord(cursor, entry);
    size_t slash = entry.name.find('/');
    if (slash == std::string_view::npos ||
        entry.name.substr(0, slash) !=
            entries[0].name.substr(0, entries[0].name.find('/')))
      cursor.fail("expected records of one folder, got \"" +
                  std::string(entry.name) + "\"");
    std::string name(entry.name.substr(slash + 1));
    if (!records.emplace(name, std::as_bytes(std::span(data))).second)
      cursor.fail("\"" + name + "\" appears twice");
  }
  if (cursor.at != directory.offset)
    cursor.fail("expected the directory");
  return records;
}

void writeStoredZip(const std::vector<ZipRecord> &records,
                    const std::function<void(std::string_view)> &write) {
  // PyTorch's writer cannot handle exceptions from what it calls, and where it
  // is told of a failure, its destructor tries to write the end, fails again
  // and throws: it is not told.
  std::exception_ptr failure;
  auto forward = [&](const void *data, size_t size) -> size_t {
    try {
      if (!failure)
        write({static_cast<const char *>(data), size});
    } catch (...) {
      failure = std::current_exception();
    }
    return size;
  };
  try {
    caffe2::serialize::PyTorchStreamWriter writer(forward);
    for (const ZipRecord &record : records)
      writer.writeRecord(record.name, record.data.data(), record.data.size());
    writer.writeEndOfFile();
  } catch (const std::exception &error) {
    if (!failure)
      throw RunError(std::string("cannot write an archive: ") + error.what());
  }
  if (failure)
    std::rethrow_exception(failure);
}

} // namespace fsdp::runtime
