//===- OpenData.h - the data that options name ----------------------------===//
#ifndef FSDP_RUNTIME_FILES_OPENDATA_H
#define FSDP_RUNTIME_FILES_OPENDATA_H

#include "fsdp/Runtime/Files/FileData.h"
#include "fsdp/Runtime/Files/TokenSamples.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::runtime {

/// The command line's options for data.
struct DataOptions {
  /// --data, each [WEIGHT:]PATH[:DTYPE]; empty: synthetic data.
  std::vector<std::string> sources = {};
  std::optional<uint64_t> shuffleSeed = {};
  std::vector<std::string> tokenInputs = {}; ///< layOutTokens
  std::string evalSplit = {};                ///< a fraction; empty: none
  Documents documents = Documents::Cross;
};

/// One of the sources.
struct DataSpec {
  std::string path;
  std::optional<plan::DType> dtype;
  int64_t weight = 0; ///< in millionths; 0: not given
};

/// [WEIGHT:]PATH[:DTYPE]: WEIGHT a decimal number above 0 with at most six
/// digits after the point, PATH without a colon, DTYPE that of the tokens of a
/// flat file. Throws InputError that begins with `option`, also for ambiguous
/// text.
DataSpec parseDataSpec(const std::string &text, const char *option);

/// The data to train on, and the data that is held out; null if there is none.
struct TrainingData {
  std::unique_ptr<FileData> training, heldOut;
};

/// Opens and checks all sources. A source is
///
///   - with a dtype, or with llm.c's header, a flat file of tokens;
///   - else PATH.bin and PATH.idx if there is a PATH.idx and no file PATH:
///     Megatron-LM's pair;
///   - else a safetensors file.
///
/// Several sources must be all token files, or all safetensors files. `option`
/// is for messages, --data or --eval-data; for the latter there may be no
/// weights. Borrows the plan. Throws InputError.
TrainingData openData(const plan::Plan &plan, const DataOptions &options);
/// The sources one after another, in order.
std::unique_ptr<FileData> openEvalData(const plan::Plan &plan,
                                       const std::vector<std::string> &sources,
                                       const DataOptions &options);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_FILES_OPENDATA_H
