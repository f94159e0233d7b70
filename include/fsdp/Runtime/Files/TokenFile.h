//===- TokenFile.h - files of token ids -----------------------------------===//
//
// Flat: token ids, one after another, little-endian, without a header; or with
// that of llm.c, 256 int32: 20240520, 1, the number of tokens, for uint16; or
// 20240801, 7, the number of tokens, for uint32.
// https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py
//
// Megatron-LM's pair: PREFIX.bin has token ids, which are divided into
// sequences; PREFIX.idx says where the sequences begin:
//
//   char[9]  "MMIDIDX\0\0"
//   uint64   version, 1
//   uint8    dtype: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16
//   uint64   sequences
//   uint64   document indices
//   int32    length of each sequence, in tokens
//   int64    byte of the .bin where each sequence begins
//   int64    document indices: a document's first sequence; the last is the
//            number of sequences
//
// https://github.com/NVIDIA/Megatron-LM, core/datasets/indexed_dataset.py
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_FILES_TOKENFILE_H
#define FSDP_RUNTIME_FILES_TOKENFILE_H

#include "fsdp/Plan/Tensors.h"
#include "fsdp/Runtime/Files/WatchedFile.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace fsdp::runtime {

/// The dtypes that token files may have.
bool isTokenDType(plan::DType dtype);

/// Immutable; several threads may read concurrently.
class TokenFile {
public:
  /// A flat file. Without `dtype` it must have llm.c's header; with it, a
  /// header that is present must agree. Throws InputError, which names the
  /// file, unless the header is valid and the file holds a whole number of
  /// tokens, at least one, and as many as the header says.
  static std::shared_ptr<const TokenFile>
  openFlat(const std::string &path, std::optional<plan::DType> dtype);
  /// PREFIX.bin and PREFIX.idx. Checks all of the index: the .bin must consist
  /// of the sequences, in order and without gaps, and so must the documents.
  /// Throws InputError.
  static std::shared_ptr<const TokenFile>
  openMegatron(const std::string &prefix);
  /// Whether the file begins with the magic number of one of llm.c's headers.
  static bool hasHeader(const WatchedFile &file);

  /// The file with the tokens.
  const WatchedFile &file() const { return data; }
  plan::DType dtype() const { return type; }
  int64_t tokens() const { return count; }
  /// The tokens from `first` on, which must be there. Throws RunError.
  void read(int64_t first, std::span<int64_t> to) const;

  /// 0: the format knows none.
  int64_t documents() const { return documentCount; }
  /// The token at which a document begins; tokens() for documents(). Throws
  /// RunError.
  int64_t documentBegin(int64_t document) const;
  /// Calls with the first token of each document in turn, then with tokens().
  void eachDocument(const std::function<void(int64_t begin)> &visit) const;

  /// Hashes that distinguish files (WatchedFile::sampledHash); and "uint16, 10
  /// tokens".
  std::string fingerprint() const;
  std::string describe() const;
  /// Of the tokens and, with Megatron-LM, of their index.
  std::vector<std::string> paths() const;

private:
  explicit TokenFile(WatchedFile file) : data(std::move(file)) {}
  void readIndex();
  void checkSequences();
  void checkDocuments();

  WatchedFile data;
  std::optional<WatchedFile> index;
  plan::DType type = plan::DType::UInt16;
  uint64_t begin = 0; ///< of the tokens, in bytes
  int64_t count = 0;
  int64_t documentCount = 0;
  int64_t sequenceCount = 0;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_FILES_TOKENFILE_H
