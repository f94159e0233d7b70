//===- SafeTensors.cpp - safetensors files --------------------------------===//
#include "fsdp/Runtime/Files/SafeTensors.h"
#include "fsdp/Runtime/Error.h"

#include <nlohmann/json.hpp>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <set>
#include <utility>

#include <sys/mman.h>

namespace fsdp::runtime {

using plan::DType;
using plan::TensorSpec;

namespace {

/// The format's own limit on the header.
constexpr uint64_t kMaxHeader = 100'000'000;
constexpr char kMetadata[] = "__metadata__";
constexpr char kDataHash[] = "data_hash";

constexpr std::array<std::pair<std::string_view, DType>, 16> kDTypes = {{
    {"F32", DType::Float32},
    {"F64", DType::Float64},
    {"F16", DType::Float16},
    {"BF16", DType::BFloat16},
    {"I64", DType::Int64},
    {"I32", DType::Int32},
    {"I16", DType::Int16},
    {"I8", DType::Int8},
    {"U8", DType::UInt8},
    {"BOOL", DType::Bool},
    {"U16", DType::UInt16},
    {"U32", DType::UInt32},
    {"U64", DType::UInt64},
    {"F8_E4M3", DType::Float8E4M3FN},
    {"F8_E5M2", DType::Float8E5M2},
    {"C64", DType::Complex64},
}};

std::string systemError() { return std::strerror(errno); }

/// Parses the header; duplicate names are errors, nesting is bounded.
nlohmann::json parseHeader(std::string_view text, const std::string &path) {
  std::vector<std::set<std::string>> keys;
  std::string duplicate;
  bool deep = false;
  auto watch = [&](int depth, nlohmann::json::parse_event_t event,
                   nlohmann::json &value) {
    using Event = nlohmann::json::parse_event_t;
    if (depth > 8)
      deep = true;
    if (event == Event::object_start)
      keys.emplace_back();
    else if (event == Event::object_end)
      keys.pop_back();
    else if (event == Event::key && !keys.back().insert(value).second)
      duplicate = value.get<std::string>();
    return !deep;
  };
  auto header = nlohmann::json::parse(text, watch, /*allow_exceptions=*/false);
  if (deep || header.is_discarded() || !header.is_object())
    throw InputError(path + ": not a safetensors file: the header is not a "
                            "json object of tensors");
  if (!duplicate.empty())
    throw InputError(path + ": two tensors are named \"" + duplicate + "\"");
  return header;
}

} // namespace

std::string_view safeTensorsName(DType dtype) {
  for (auto [name, type] : kDTypes)
    if (type == dtype)
      return name;
  return "";
}

std::string describe(const TensorSpec &spec) {
  std::string text(plan::dtypeName(spec.dtype));
  text += "[";
  for (size_t i = 0; i < spec.shape.size(); ++i)
    text += (i ? ", " : "") + std::to_string(spec.shape[i]);
  return text + "]";
}

SafeTensors::SafeTensors(const std::string &path)
    : SafeTensors(WatchedFile(path)) {}

SafeTensors::SafeTensors(const WatchedFile &file) : filePath(file.path()) {
  auto size = size_t(file.size());
  if (size < 8)
    throw InputError(filePath +
                     ": not a safetensors file: expected at least 8 "
                     "bytes, got " +
                     std::to_string(size));
  void *mapped =
      mmap(nullptr, size, PROT_READ, MAP_SHARED, file.descriptor(), 0);
  if (mapped == MAP_FAILED)
    throw InputError(filePath + ": cannot map: " + systemError());
  bytes = {static_cast<const std::byte *>(mapped), size};
  try {
    parse();
  } catch (...) {
    munmap(mapped, size);
    throw;
  }
}

SafeTensors::SafeTensors(SafeTensors &&other) noexcept
    : filePath(std::move(other.filePath)),
      bytes(std::exchange(other.bytes, {})), data(other.data),
      dataHash(std::move(other.dataHash)), table(std::move(other.table)) {}

SafeTensors::~SafeTensors() {
  if (!bytes.empty())
    munmap(const_cast<std::byte *>(bytes.data()), bytes.size());
}

void SafeTensors::parse() {
  uint64_t headerSize = 0;
  std::memcpy(&headerSize, bytes.data(), 8);
  if (headerSize > kMaxHeader || headerSize > bytes.size() - 8)
    throw InputError(filePath +
                     ": not a safetensors file: it claims a header of " +
                     std::to_string(headerSize) + " bytes");
  std::string_view text(reinterpret_cast<const char *>(bytes.data()) + 8,
                        headerSize);
  nlohmann::json header = parseHeader(text, filePath);
  data = bytes.subspan(8 + headerSize);
  if (header.contains(kMetadata) && header[kMetadata].is_object())
    if (auto hash = header[kMetadata].find(kDataHash);
        hash != header[kMetadata].end() && hash->is_string())
      dataHash = *hash;

  for (const auto &item : header.items()) {
    if (item.key() == kMetadata)
      continue;
    auto fail = [&](const std::string &message) {
      throw InputError(filePath + ": tensor \"" + item.key() +
                       "\": " + message);
    };
    const nlohmann::json &value = item.value();
    if (!value.is_object() || !value.contains("dtype") ||
        !value["dtype"].is_string() || !value.contains("shape") ||
        !value["shape"].is_array() || !value.contains("data_offsets") ||
        !value["data_offsets"].is_array() || value["data_offsets"].size() != 2)
      fail("expected dtype, shape and data_offsets");
    Entry entry;
    const auto &name = value["dtype"].get_ref<const std::string &>();
    bool known = false;
    for (auto [text, dtype] : kDTypes)
      if (text == name) {
        entry.spec.dtype = dtype;
        known = true;
      }
    if (!known)
      fail("unknown dtype \"" + name + "\"");
    int64_t size = plan::byteWidth(entry.spec.dtype);
    for (const nlohmann::json &extent : value["shape"]) {
      if (!extent.is_number_unsigned() ||
          extent.get<uint64_t>() > uint64_t(INT64_MAX) ||
          __builtin_mul_overflow(
              size, std::max<int64_t>(extent.get<uint64_t>(), 1), &size))
        fail("bad shape");
      entry.spec.shape.push_back(extent.get<int64_t>());
    }
    for (const nlohmann::json &offset : value["data_offsets"])
      if (!offset.is_number_unsigned())
        fail("bad data_offsets");
    auto begin = value["data_offsets"][0].get<uint64_t>();
    auto end = value["data_offsets"][1].get<uint64_t>();
    if (begin > end || end > data.size())
      fail("data_offsets [" + std::to_string(begin) + ", " +
           std::to_string(end) + "] lie outside the file's " +
           std::to_string(data.size()) + " bytes of data");
    if (end - begin != uint64_t(entry.spec.numBytes()))
      fail("expected " + std::to_string(entry.spec.numBytes()) + " bytes for " +
           describe(entry.spec) + ", got " + std::to_string(end - begin));
    entry.data = data.subspan(begin, end - begin);
    table.emplace(item.key(), std::move(entry));
  }
}

void SafeTensors::dropPages() const {
  madvise(const_cast<std::byte *>(bytes.data()), bytes.size(), MADV_DONTNEED);
}

std::string SafeTensors::hash() const {
  return hashBytes(
      {reinterpret_cast<const char *>(bytes.data()), bytes.size()});
}

void SafeTensors::checkHash() const {
  if (dataHash.empty())
    return;
  std::string got =
      hashBytes({reinterpret_cast<const char *>(data.data()), data.size()});
  if (got != dataHash)
    throw InputError(filePath + ": expected data with hash " + dataHash +
                     ", which the file states, got " + got);
}

namespace {

std::string hashText(XXH128_hash_t hash) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  std::string text = "xxh3:";
  for (unsigned char byte : canonical.digest) {
    std::array<char, 3> digits{};
    std::snprintf(digits.data(), digits.size(), "%02x", byte);
    text += digits.data();
  }
  return text;
}

std::string hashTensors(const std::vector<NamedTensor> &tensors) {
  HashState state;
  for (const NamedTensor &tensor : tensors)
    state.add(tensor.data);
  return state.text();
}

} // namespace

struct HashState::State {
  XXH3_state_t xxh3;
};

HashState::HashState() : state(std::make_unique<State>()) {
  XXH3_128bits_reset(&state->xxh3);
}

HashState::~HashState() = default;

void HashState::add(std::span<const std::byte> bytes) {
  XXH3_128bits_update(&state->xxh3, bytes.data(), bytes.size());
}

std::string HashState::text() const {
  return hashText(XXH3_128bits_digest(&state->xxh3));
}

std::string hashBytes(std::string_view bytes) {
  return hashText(XXH3_128bits(bytes.data(), bytes.size()));
}

void writeSafeTensors(OutputFile &file,
                      const std::vector<NamedTensor> &tensors) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  header[kMetadata] = {{"format", "pt"}, {kDataHash, hashTensors(tensors)}};
  uint64_t offset = 0;
  for (const NamedTensor &tensor : tensors) {
    std::string_view dtype = safeTensorsName(tensor.spec.dtype);
    if (dtype.empty())
      throw RunError("tensor \"" + tensor.name +
                     "\": safetensors has no dtype " +
                     std::string(plan::dtypeName(tensor.spec.dtype)));
    header[tensor.name] = {
        {"dtype", dtype},
        {"shape", tensor.spec.shape},
        {"data_offsets", {offset, offset + tensor.data.size()}}};
    offset += tensor.data.size();
  }
  std::string text = header.dump();
  // The data begins 8-byte aligned, as the format's own writer does it.
  text.append((8 - text.size() % 8) % 8, ' ');
  uint64_t size = text.size();
  file.write({reinterpret_cast<const char *>(&size), sizeof(size)});
  file.write(text);
  for (const NamedTensor &tensor : tensors)
    file.write({reinterpret_cast<const char *>(tensor.data.data()),
                tensor.data.size()});
  file.commit();
}

} // namespace fsdp::runtime
