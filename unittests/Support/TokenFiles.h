//===- TokenFiles.h - files of tokens for tests ---------------------------===//
#ifndef FSDP_UNITTESTS_SUPPORT_TOKENFILES_H
#define FSDP_UNITTESTS_SUPPORT_TOKENFILES_H

#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

namespace fsdp::test {

template <typename T> std::string bytesOf(const std::vector<T> &values) {
  return {reinterpret_cast<const char *>(values.data()),
          values.size() * sizeof(T)};
}

/// The numbers from `first` on.
template <typename T> std::vector<T> countUp(size_t count, T first = 0) {
  std::vector<T> values(count);
  std::iota(values.begin(), values.end(), first);
  return values;
}

/// llm.c's header for so many tokens.
inline std::string flatHeader(int32_t magic, int32_t version, int32_t tokens) {
  std::vector<int32_t> header(256);
  header[0] = magic;
  header[1] = version;
  header[2] = tokens;
  return bytesOf(header);
}

/// The parts of Megatron-LM's index.
struct IndexParts {
  std::string magic{"MMIDIDX\0\0", 9};
  uint64_t version = 1;
  uint8_t dtype = 8;
  std::vector<int32_t> lengths;
  std::vector<int64_t> pointers;
  std::vector<int64_t> documents;

  /// Of documents of one sequence each, of such lengths.
  static IndexParts of(const std::vector<int32_t> &lengths, int64_t width = 2) {
    IndexParts parts;
    parts.lengths = lengths;
    int64_t at = 0;
    for (int32_t length : lengths) {
      parts.documents.push_back(int64_t(parts.pointers.size()));
      parts.pointers.push_back(at);
      at += length * width;
    }
    parts.documents.push_back(int64_t(lengths.size()));
    return parts;
  }
  std::string text() const {
    return magic + bytesOf(std::vector{version}) + char(dtype) +
           bytesOf(std::vector<uint64_t>{lengths.size(), documents.size()}) +
           bytesOf(lengths) + bytesOf(pointers) + bytesOf(documents);
  }
};

} // namespace fsdp::test

#endif // FSDP_UNITTESTS_SUPPORT_TOKENFILES_H
