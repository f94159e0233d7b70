//===- TokenSamples.cpp - samples cut from a stream of tokens -------------===//
#include "fsdp/Runtime/Files/TokenSamples.h"
#include "fsdp/Runtime/Error.h"

#include <algorithm>
#include <cstring>

namespace fsdp::runtime {

using plan::DType;

namespace {

template <typename T>
void narrow(std::span<const int64_t> from, std::byte *to) {
  for (size_t i = 0; i < from.size(); ++i) {
    auto value = T(from[i]);
    std::memcpy(to + i * sizeof(T), &value, sizeof(T));
  }
}

void write(std::span<const int64_t> from, DType dtype, std::byte *to) {
  switch (plan::byteWidth(dtype)) {
  case 1:
    return narrow<uint8_t>(from, to);
  case 2:
    return narrow<uint16_t>(from, to);
  case 4:
    return narrow<uint32_t>(from, to);
  default:
    return narrow<uint64_t>(from, to);
  }
}

/// The ids that a dtype has.
std::pair<int64_t, int64_t> rangeOf(DType dtype) {
  int64_t bits = plan::byteWidth(dtype) * 8;
  bool isSigned = dtype == DType::Int8 || dtype == DType::Int16 ||
                  dtype == DType::Int32 || dtype == DType::Int64;
  if (bits == 64)
    return {INT64_MIN, INT64_MAX};
  if (isSigned)
    return {-(int64_t(1) << (bits - 1)), int64_t(1) << (bits - 1)};
  return {0, int64_t(1) << bits};
}

class TokenSamples final : public Samples {
public:
  TokenSamples(const plan::Plan &plan, std::shared_ptr<const TokenFile> opened,
               TokenLayout wanted, Documents documents)
      : plan(plan), file(std::move(opened)), layout(std::move(wanted)),
        end(file->tokens()), lastDocument(file->documents()),
        documents(documents) {
    for (const TokenInput &input : layout.inputs) {
      auto [low, high] = rangeOf(plan.inputs[input.input].spec.dtype);
      layout.low = std::max(layout.low, low);
      layout.high = std::min(layout.high, high);
    }
    if (documents == Documents::Within && file->documents() == 0)
      throw InputError("--documents within: " + file->file().path() +
                       ": a flat file of tokens has no documents; give a "
                       "pair of Megatron-LM's (PREFIX.bin, PREFIX.idx)");
    cut();
  }

  int64_t count() const override { return samples; }

  void read(int64_t number, int64_t row,
            std::span<std::byte *const> batch) const override {
    int64_t first = beginOf(number);
    std::vector<int64_t> tokens(size_t(layout.span()));
    file->read(first, tokens);
    for (size_t i = 0; i < tokens.size(); ++i)
      if (tokens[i] < layout.low || tokens[i] >= layout.high)
        refuse(first + int64_t(i), tokens[i]);
    for (const TokenInput &input : layout.inputs) {
      DType dtype = plan.inputs[input.input].spec.dtype;
      auto bytes = size_t(layout.length * plan::byteWidth(dtype));
      write(
          std::span(tokens).subspan(size_t(input.shift), size_t(layout.length)),
          dtype, batch[input.input] + size_t(row) * bytes);
    }
  }

  std::pair<std::shared_ptr<const Samples>, std::shared_ptr<const Samples>>
  split(int64_t millionths) const override {
    auto kept = [&](int64_t whole) {
      return whole - int64_t(__int128_t(whole) * millionths / kMillion);
    };
    auto first = std::make_shared<TokenSamples>(*this);
    auto second = std::make_shared<TokenSamples>(*this);
    if (file->documents() > 0) {
      int64_t document = kept(file->documents());
      first->lastDocument = second->firstDocument = document;
      first->end = second->begin = file->documentBegin(document);
    } else {
      first->end = second->begin = kept(file->tokens());
    }
    try {
      first->cut();
      second->cut();
    } catch (const InputError &error) {
      throw InputError("--eval-split: " + std::string(error.what()));
    }
    return {first, second};
  }

  std::string fingerprint() const override {
    std::string text = "tokens " + std::to_string(begin) + " " +
                       std::to_string(end) + " length " +
                       std::to_string(layout.length) + " shifts";
    for (const TokenInput &input : layout.inputs)
      text += " " + std::to_string(input.shift);
    return text + (documents == Documents::Within ? " within " : " cross ") +
           file->fingerprint();
  }
  std::vector<std::string> paths() const override { return file->paths(); }
  std::string describe() const override {
    std::string text = file->file().path() + " (" + file->describe() + ", " +
                       std::to_string(samples) + " samples of " +
                       std::to_string(layout.length) + ": ";
    for (const TokenInput &input : layout.inputs)
      text += (&input == layout.inputs.data() ? "" : ", ") +
              plan.inputs[input.input].name + "+" + std::to_string(input.shift);
    return text + ")";
  }
  std::string hash() const override {
    if (file->documents() > 0)
      throw InputError("--data-hash: expected one file, got the two files of " +
                       file->file().path());
    return file->file().hash();
  }

private:
  /// Finds the samples in [begin, end).
  void cut() {
    if (documents == Documents::Within) {
      cutDocuments();
    } else {
      int64_t whole = end - begin - layout.span() + layout.length;
      samples = std::max<int64_t>(0, whole / layout.length);
    }
    if (samples == 0)
      throw InputError(
          file->file().path() + ": expected at least " +
          std::to_string(layout.span()) + " tokens" +
          (documents == Documents::Within ? " in a document" : "") +
          ", for a sample of " + std::to_string(layout.length) + ", got " +
          std::to_string(end - begin));
  }

  void cutDocuments() {
    begins.clear();
    before.clear();
    samples = 0;
    int64_t document = 0;
    file->eachDocument([&](int64_t at) {
      bool ends = document > firstDocument && document <= lastDocument;
      if (ends) {
        int64_t whole = at - begins.back() - layout.span() + layout.length;
        int64_t here = std::max<int64_t>(0, whole / layout.length);
        if (here == 0) {
          begins.pop_back();
          before.pop_back();
        }
        samples += here;
      }
      if (document >= firstDocument && document < lastDocument) {
        begins.push_back(at);
        before.push_back(samples);
      }
      ++document;
    });
  }

  int64_t beginOf(int64_t number) const {
    if (documents == Documents::Cross)
      return begin + number * layout.length;
    auto next = std::upper_bound(before.begin(), before.end(), number);
    auto at = size_t(next - before.begin() - 1);
    return begins[at] + (number - before[at]) * layout.length;
  }

  [[noreturn]] void refuse(int64_t token, int64_t id) const {
    throw InputError(file->file().path() + ": token " + std::to_string(token) +
                     " is " + std::to_string(id) + ": expected an id in [" +
                     std::to_string(layout.low) + ", " +
                     std::to_string(layout.high) + "), " + layout.bound);
  }

  const plan::Plan &plan;
  std::shared_ptr<const TokenFile> file;
  TokenLayout layout;
  /// What the samples are cut from: tokens, and documents.
  int64_t begin = 0, end;
  int64_t firstDocument = 0, lastDocument;
  Documents documents;
  int64_t samples = 0;
  /// Within documents: of each document that has samples, the first token, and
  /// the number of samples in those before.
  std::vector<int64_t> begins, before;
};

} // namespace

std::shared_ptr<const Samples>
makeTokenSamples(const plan::Plan &plan, std::shared_ptr<const TokenFile> file,
                 TokenLayout layout, Documents documents) {
  return std::make_shared<TokenSamples>(plan, std::move(file),
                                        std::move(layout), documents);
}

} // namespace fsdp::runtime
