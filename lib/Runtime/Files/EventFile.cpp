//===- EventFile.cpp - scalars for TensorBoard ----------------------------===//
#include "fsdp/Runtime/Files/EventFile.h"
#include "fsdp/Runtime/Error.h"

#include <array>
#include <bit>
#include <chrono>
#include <cstring>
#include <filesystem>

#include <unistd.h>

namespace fsdp::runtime {

static_assert(std::endian::native == std::endian::little);

namespace {

// Of Event, Summary and Summary.Value: a field's number, and how it is written.
constexpr char kWallTime = 1 << 3 | 1;    // double
constexpr char kStep = 2 << 3;            // varint
constexpr char kFileVersion = 3 << 3 | 2; // string
constexpr char kSummary = 5 << 3 | 2;     // message
constexpr char kValue = 1 << 3 | 2;       // message
constexpr char kTag = 1 << 3 | 2;         // string
constexpr char kSimpleValue = 2 << 3 | 5; // float

template <typename T> std::string raw(T value) {
  std::string bytes(sizeof(value), '\0');
  std::memcpy(bytes.data(), &value, sizeof(value));
  return bytes;
}

std::string varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7)
    bytes += char(value | 0x80);
  return bytes + char(value);
}

std::string sized(char field, const std::string &bytes) {
  return field + varint(bytes.size()) + bytes;
}

std::string wallTime() {
  auto now = std::chrono::system_clock::now().time_since_epoch();
  return kWallTime + raw(std::chrono::duration<double>(now).count());
}

constexpr std::array<uint32_t, 256> kTable = [] {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    table[byte] = byte;
    for (int bit = 0; bit < 8; ++bit)
      table[byte] = table[byte] >> 1 ^ (table[byte] & 1 ? 0x82f63b78 : 0);
  }
  return table;
}();

/// The mask keeps a checksum of data that contains checksums from coinciding
/// with them.
uint32_t masked(uint32_t crc) { return std::rotr(crc, 15) + 0xa282ead8; }

} // namespace

uint32_t crc32c(std::string_view bytes) {
  uint32_t crc = ~0u;
  for (char byte : bytes)
    crc = crc >> 8 ^ kTable[(crc ^ uint8_t(byte)) & 0xff];
  return ~crc;
}

EventFile::EventFile(const std::string &folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error)
    throw InputError(folder + ": cannot make the folder: " + error.message());
  char host[256] = {};
  gethostname(host, sizeof(host) - 1);
  auto now = std::chrono::system_clock::now().time_since_epoch();
  auto micros =
      std::chrono::duration_cast<std::chrono::microseconds>(now).count();
  file.emplace((std::filesystem::path(folder) /
                ("events.out.tfevents." + std::to_string(micros / 1000000) +
                 "." + host + "." + std::to_string(getpid()) + "." +
                 std::to_string(micros % 1000000)))
                   .string());
  append(wallTime() + sized(kFileVersion, "brain.Event:2"));
}

void EventFile::add(int64_t step, const Scalars &scalars) {
  std::string summary;
  for (const auto &[name, value] : scalars)
    summary += sized(kValue, sized(kTag, name) + kSimpleValue +
                                 raw(static_cast<float>(value)));
  append(wallTime() + kStep + varint(uint64_t(step)) +
         sized(kSummary, summary));
}

void EventFile::append(const std::string &event) {
  std::string length = raw(uint64_t(event.size()));
  file->append(length + raw(masked(crc32c(length))) + event +
               raw(masked(crc32c(event))));
}

} // namespace fsdp::runtime
