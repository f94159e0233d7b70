//===- TokenSamples.h - samples cut from a stream of tokens ---------------===//
#ifndef FSDP_RUNTIME_FILES_TOKENSAMPLES_H
#define FSDP_RUNTIME_FILES_TOKENSAMPLES_H

#include "fsdp/Runtime/Files/Samples.h"
#include "fsdp/Runtime/Files/TokenFile.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::runtime {

/// What an input of the plan takes from a sample that begins at token i: the
/// tokens [i + shift, i + shift + length).
struct TokenInput {
  size_t input; ///< in the plan
  int64_t shift;
};

/// How samples are cut from tokens: what each input gets, and which ids are
/// allowed.
struct TokenLayout {
  int64_t length = 0;
  std::vector<TokenInput> inputs;
  /// Ids are in [low, high).
  int64_t low = 0, high = 0;
  std::string bound; ///< where that bound comes from, for messages
  /// Tokens from the beginning of a sample to its end.
  int64_t span() const;
};

/// The layout of a plan whose inputs are all token ids, [b, L]. `names` are
/// those of --token-inputs, each NAME or NAME+SHIFT; by default the integer
/// inputs of the plan, of which there may be two if the first alone goes into
/// an embedding, or none does. The n-th has the shift n unless it says another.
/// Allowed ids are the row indices of the embedding (aten::embedding) that one
/// of the inputs goes into. A plan without one takes ids in [low, high) of its
/// first token input, the range of the batch that was captured. Throws
/// InputError.
TokenLayout layOutTokens(const plan::Plan &plan,
                         const std::vector<std::string> &names);

/// Where samples may lie.
enum class Documents : uint8_t {
  Cross, ///< over the ends of documents, as in Megatron-LM
  Within ///< in one document; a remainder at its end is dropped
};

/// Cross: sample k begins at token k * length. Within: each document of at
/// least span() tokens gives samples, the first at its beginning, as long as
/// span() tokens are left; this takes 16 bytes of memory per document. Throws
/// InputError for a file with too few tokens, or without documents.
std::shared_ptr<const Samples>
makeTokenSamples(const plan::Plan &plan, std::shared_ptr<const TokenFile> file,
                 TokenLayout layout, Documents documents);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_FILES_TOKENSAMPLES_H
