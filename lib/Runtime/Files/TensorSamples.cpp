//===- TensorSamples.cpp - samples in a safetensors file ------------------===//
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Files/DataSource.h"
#include "fsdp/Runtime/Files/Samples.h"

#include <algorithm>
#include <limits>

namespace fsdp::runtime {

namespace {

/// The same names, dtypes and shapes beyond dim 0, and at least one sample.
void checkTensors(const plan::Plan &plan, const SafeTensors &data) {
  std::string wanted;
  for (const plan::Input &input : plan.inputs)
    wanted += (wanted.empty() ? "\"" : ", \"") + input.name + "\"";
  for (const auto &[name, entry] : data.entries()) {
    bool known = false;
    for (const plan::Input &input : plan.inputs)
      known |= input.name == name;
    if (!known)
      throw InputError(data.path() + ": tensor \"" + name +
                       "\" is not an input of the plan, which has " +
                       (wanted.empty() ? "none" : wanted));
  }
  for (const plan::Input &input : plan.inputs) {
    auto it = data.entries().find(input.name);
    if (it == data.entries().end())
      throw InputError(data.path() + ": no tensor for input \"" + input.name +
                       "\"");
    plan::TensorSpec got = it->second.spec;
    plan::TensorSpec want = input.spec;
    if (!got.shape.empty() && !want.shape.empty())
      want.shape[0] = got.shape[0];
    if (got != want || got.shape.empty())
      throw InputError(data.path() + ": input \"" + input.name +
                       "\": expected " + describe(input.spec) +
                       " with any number of samples in dim 0, got " +
                       describe(got));
    if (got.shape[0] == 0)
      throw InputError(data.path() + ": input \"" + input.name +
                       "\": expected at least one sample, got none");
  }
}

/// The rows of one input.
struct Rows {
  uint64_t offset; ///< of row 0 in the file
  int64_t count;
  size_t bytes;  ///< of one
  int64_t batch; ///< in the plan
};

class TensorSamples final : public Samples {
public:
  TensorSamples(const plan::Plan &plan, const std::string &path)
      : file(std::make_shared<WatchedFile>(path)),
        tensors(std::make_shared<SafeTensors>(*file)), batch(batchSize(plan)) {
    checkTensors(plan, *tensors);
    end = std::numeric_limits<int64_t>::max();
    for (const plan::Input &input : plan.inputs) {
      const SafeTensors::Entry &entry = tensors->entries().at(input.name);
      int64_t count = entry.spec.shape[0];
      inputs.push_back({tensors->offsetOf(entry), count,
                        size_t(entry.spec.numBytes() / count),
                        input.spec.shape[0]});
      even &= count == inputs[0].count && input.spec.shape[0] == batch;
    }
    // Where they are not even, each tensor begins again by itself.
    if (even && !inputs.empty())
      end = inputs[0].count;
  }

  int64_t count() const override { return end - begin; }
  int64_t epoch() const override {
    if (even)
      return count();
    int64_t batches = end;
    for (const Rows &rows : inputs)
      if (rows.batch > 0)
        batches = std::min(batches, rows.count / rows.batch);
    return batches * batch;
  }

  void read(int64_t number, int64_t row,
            std::span<std::byte *const> to) const override {
    number += begin;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const Rows &rows = inputs[i];
      if (rows.batch == batch)
        copy(rows, number, to[i] + size_t(row) * rows.bytes);
      else if (row == 0)
        copyBatch(rows, number, to[i]);
    }
  }

  std::pair<std::shared_ptr<const Samples>, std::shared_ptr<const Samples>>
  split(int64_t millionths) const override {
    requireEven("--eval-split");
    auto held = int64_t(__int128_t(count()) * millionths / kMillion);
    if (held == 0 || held == count())
      throw InputError("--eval-split: " + file->path() +
                       ": expected samples to train on and to hold out, got " +
                       std::to_string(count()) + " in all");
    auto first = std::make_shared<TensorSamples>(*this);
    auto second = std::make_shared<TensorSamples>(*this);
    first->end = second->begin = end - held;
    return {first, second};
  }

  void requireEven(const char *option) const override {
    if (!even)
      throw InputError(std::string(option) + ": " + file->path() +
                       ": expected equally many samples of each input");
  }

  std::string fingerprint() const override {
    return "tensors " + std::to_string(begin) + " " + std::to_string(end) +
           " " + file->sampledHash();
  }
  std::string describe() const override {
    return file->path() + " (safetensors, " +
           (even ? std::to_string(count()) + " samples" : "uneven inputs") +
           ")";
  }
  std::vector<std::string> paths() const override { return {file->path()}; }
  std::string hash() const override { return tensors->hash(); }
  void checkHash() const override { tensors->checkHash(); }

private:
  void copy(const Rows &rows, int64_t number, std::byte *to) const {
    auto row = uint64_t(number % rows.count);
    file->read(rows.offset + row * rows.bytes, {to, rows.bytes});
  }
  void copyBatch(const Rows &rows, int64_t number, std::byte *to) const {
    if (number % batch != 0)
      throw RunError(file->path() +
                     ": inputs with different batch sizes: expected a sample "
                     "that begins a batch of " +
                     std::to_string(batch) + ", got sample " +
                     std::to_string(number));
    for (int64_t i = 0; i < rows.batch; ++i)
      copy(rows, number / batch * rows.batch + i, to + size_t(i) * rows.bytes);
  }

  std::shared_ptr<WatchedFile> file;
  std::shared_ptr<SafeTensors> tensors;
  int64_t batch;
  std::vector<Rows> inputs;
  bool even = true;
  int64_t begin = 0, end = 0;
};

} // namespace

std::shared_ptr<const Samples> openTensorSamples(const plan::Plan &plan,
                                                 const std::string &path) {
  return std::make_shared<TensorSamples>(plan, path);
}

} // namespace fsdp::runtime
