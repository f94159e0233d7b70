//===- OpenData.cpp - the data that options name --------------------------===//
#include "fsdp/Runtime/Files/OpenData.h"
#include "fsdp/Runtime/Error.h"

#include <algorithm>
#include <filesystem>

namespace fsdp::runtime {

namespace {

constexpr char kForm[] = "expected [WEIGHT:]PATH[:DTYPE], where a path has no "
                         "colon";
/// Of a weight, and of a fraction.
constexpr size_t kDigits = 6;
constexpr size_t kMaxWhole = 6;

bool isNumber(const std::string &text) {
  return !text.empty() &&
         text.find_first_not_of("0123456789.") == std::string::npos;
}

/// In millionths; nullopt for anything but a decimal number with at most six
/// digits on each side of the point.
std::optional<int64_t> parseDecimal(const std::string &text) {
  if (!isNumber(text))
    return std::nullopt;
  size_t point = std::min(text.find('.'), text.size());
  std::string whole = text.substr(0, point);
  std::string part = point < text.size() ? text.substr(point + 1) : "";
  if (whole.size() > kMaxWhole || part.size() > kDigits ||
      part.find('.') != std::string::npos || (whole + part).empty())
    return std::nullopt;
  part.resize(kDigits, '0');
  return std::stoll(whole + part);
}

std::vector<std::string> splitAtColons(const std::string &text) {
  std::vector<std::string> parts(1);
  for (char c : text)
    if (c == ':')
      parts.emplace_back();
    else
      parts.back() += c;
  return parts;
}

bool exists(const std::string &path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

std::shared_ptr<const TokenFile> openTokens(const DataSpec &spec) {
  if (spec.dtype)
    return TokenFile::openFlat(spec.path, spec.dtype);
  bool hasIndex = exists(spec.path + ".idx");
  if (!exists(spec.path)) {
    if (hasIndex || exists(spec.path + ".bin"))
      return TokenFile::openMegatron(spec.path);
    return nullptr;
  }
  if (hasIndex)
    throw InputError(spec.path + ": there is " + spec.path +
                     ".idx too: expected one of them; give a flat file of "
                     "tokens with its dtype (" +
                     spec.path + ":uint16)");
  std::filesystem::path path(spec.path);
  bool isBin = path.extension() == ".bin";
  if (isBin && exists(path.replace_extension(".idx").string()))
    throw InputError(spec.path +
                     ": there is an index beside it: expected the "
                     "prefix " +
                     path.replace_extension("").string() + ", or the dtype (" +
                     spec.path + ":uint16) to read it as a flat file");
  if (isBin || TokenFile::hasHeader(WatchedFile(spec.path)))
    return TokenFile::openFlat(spec.path, std::nullopt);
  return nullptr;
}

struct Opened {
  FileData::Sources sources;
  std::vector<int64_t> weights;
};

/// Opens the sources of an option. The layout is that of the plan for tokens.
Opened open(const plan::Plan &plan, const std::vector<std::string> &texts,
            const DataOptions &options, const char *option) {
  Opened opened;
  bool tokens = false;
  for (const std::string &text : texts) {
    DataSpec spec = parseDataSpec(text, option);
    std::shared_ptr<const TokenFile> file = openTokens(spec);
    if (!opened.sources.empty() && tokens != (file != nullptr))
      throw InputError(std::string(option) +
                       ": expected sources of one kind, got tokens and "
                       "safetensors files");
    tokens = file != nullptr;
    if (tokens)
      opened.sources.push_back(makeTokenSamples(
          plan, std::move(file), layOutTokens(plan, options.tokenInputs),
          options.documents));
    else
      opened.sources.push_back(openTensorSamples(plan, spec.path));
    if (spec.weight > 0)
      opened.weights.push_back(spec.weight);
  }
  if (!opened.weights.empty() && opened.sources.size() == 1)
    throw InputError(std::string(option) +
                     ": a weight is only for one of several sources, got one");
  if (!opened.weights.empty() && opened.weights.size() != opened.sources.size())
    throw InputError(std::string(option) +
                     ": expected a weight for every source or for none, got " +
                     std::to_string(opened.weights.size()) + " for " +
                     std::to_string(opened.sources.size()));
  if (opened.sources.size() > 1)
    for (const auto &source : opened.sources)
      source->requireEven(option);
  if (!tokens && !options.tokenInputs.empty())
    throw InputError(std::string("--token-inputs: expected files of tokens "
                                 "for ") +
                     option + ", got safetensors");
  if (!tokens && options.documents == Documents::Within)
    throw InputError(std::string("--documents within: expected files of tokens "
                                 "for ") +
                     option + ", got safetensors");
  return opened;
}

} // namespace

DataSpec parseDataSpec(const std::string &text, const char *option) {
  auto fail = [&](const std::string &message) {
    throw InputError(std::string(option) + ": " + message + ", got \"" +
                     text.substr(0, 200) + "\"");
  };
  std::vector<std::string> parts = splitAtColons(text);
  if (parts.size() > 3)
    fail(kForm);
  std::optional<plan::DType> dtype = plan::parseDType(parts.back());
  bool hasDType = parts.size() > 1 && dtype;
  bool hasWeight = parts.size() > 1 && isNumber(parts[0]);
  if (parts.size() == 2 && hasDType && hasWeight)
    fail("is \"" + parts[0] + "\" a weight or a path? expected ./" + parts[0] +
         " for a path");
  if (parts.size() != 1 + size_t(hasDType) + size_t(hasWeight))
    fail(kForm);
  DataSpec spec;
  spec.path = parts[hasWeight ? 1 : 0];
  if (spec.path.empty())
    fail("expected a path");
  if (hasDType) {
    if (!isTokenDType(*dtype))
      fail("expected a dtype of tokens: uint8, uint16, uint32, int8, int16, "
           "int32 or int64");
    spec.dtype = dtype;
  }
  if (hasWeight) {
    std::optional<int64_t> weight = parseDecimal(parts[0]);
    if (!weight || *weight == 0)
      fail("expected a weight above 0, with at most six digits on each side of "
           "the point");
    spec.weight = *weight;
  }
  return spec;
}

TrainingData openData(const plan::Plan &plan, const DataOptions &options) {
  Opened opened = open(plan, options.sources, options, "--data");
  if (options.shuffleSeed)
    for (const auto &source : opened.sources)
      source->requireEven("--shuffle-seed");
  TrainingData data;
  if (!options.evalSplit.empty()) {
    std::optional<int64_t> fraction = parseDecimal(options.evalSplit);
    if (!fraction || *fraction == 0 || *fraction >= kMillion)
      throw InputError("--eval-split: expected a fraction between 0 and 1 with "
                       "at most six digits, got \"" +
                       options.evalSplit + "\"");
    FileData::Sources held;
    for (auto &source : opened.sources) {
      auto [first, second] = source->split(*fraction);
      source = first;
      held.push_back(second);
    }
    data.heldOut = std::make_unique<FileData>(
        plan, std::move(held), std::vector<int64_t>(), std::nullopt);
  }
  data.training = std::make_unique<FileData>(plan, std::move(opened.sources),
                                             std::move(opened.weights),
                                             options.shuffleSeed);
  return data;
}

std::unique_ptr<FileData> openEvalData(const plan::Plan &plan,
                                       const std::vector<std::string> &sources,
                                       const DataOptions &options) {
  Opened opened = open(plan, sources, options, "--eval-data");
  if (!opened.weights.empty())
    throw InputError("--eval-data: expected no weights: all samples are used "
                     "once");
  return std::make_unique<FileData>(plan, std::move(opened.sources),
                                    std::vector<int64_t>(), std::nullopt);
}

} // namespace fsdp::runtime
