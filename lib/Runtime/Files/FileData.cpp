//===- FileData.cpp - inputs read from files ------------------------------===//
#include "fsdp/Runtime/Files/FileData.h"
#include "fsdp/Runtime/Memory/Layout.h"
#include "fsdp/Support/Message.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace fsdp::runtime {

namespace {

/// Sources that a description names.
constexpr size_t kDescribed = 4;

std::vector<int64_t> countsOf(const FileData::Sources &sources) {
  std::vector<int64_t> counts;
  for (const auto &source : sources)
    counts.push_back(source->count());
  return counts;
}

} // namespace

FileData::FileData(const plan::Plan &plan, Sources sources,
                   std::vector<int64_t> given, std::optional<uint64_t> seed)
    : plan(plan), all(std::move(sources)), weights(std::move(given)),
      seed(seed), order(countsOf(all), weights, seed) {
  for (const plan::Input &input : plan.inputs) {
    offsets.push_back(bytes);
    bytes += plan::alignTo(size_t(input.spec.numBytes()));
  }
}

void FileData::fillRows(int64_t first, int64_t rank,
                        std::span<std::byte *const> to) const {
  int64_t batch = batchSize(plan);
  for (int64_t row = 0; row < batch; ++row) {
    SampleOrder::Place place = order.at(first + rank * batch + row);
    all[place.source]->read(place.sample, row, to);
  }
}

void FileData::fill(int64_t first, int64_t rank,
                    std::span<std::byte> to) const {
  std::vector<std::byte *> begins;
  for (size_t offset : offsets)
    begins.push_back(to.data() + offset);
  fillRows(first, rank, begins);
}

std::vector<at::Tensor> FileData::inputs(int64_t first, int64_t rank) const {
  std::vector<at::Tensor> batch;
  std::vector<std::byte *> begins;
  for (const plan::Input &input : plan.inputs) {
    batch.push_back(at::empty(input.spec.shape, scalarType(input.spec.dtype)));
    begins.push_back(static_cast<std::byte *>(batch.back().mutable_data_ptr()));
  }
  fillRows(first, rank, begins);
  return batch;
}

std::vector<at::Tensor> FileData::view(std::span<std::byte> from) const {
  std::vector<at::Tensor> batch;
  for (size_t i = 0; i < offsets.size(); ++i)
    batch.push_back(at::from_blob(from.data() + offsets[i],
                                  plan.inputs[i].spec.shape,
                                  scalarType(plan.inputs[i].spec.dtype)));
  return batch;
}

std::vector<at::Tensor> FileData::copy(std::span<const std::byte> from) const {
  std::vector<at::Tensor> batch;
  for (size_t i = 0; i < offsets.size(); ++i) {
    const plan::TensorSpec &spec = plan.inputs[i].spec;
    batch.push_back(at::empty(spec.shape, scalarType(spec.dtype)));
    if (batch[i].numel() > 0)
      std::memcpy(batch[i].mutable_data_ptr(), from.data() + offsets[i],
                  batch[i].nbytes());
  }
  return batch;
}

int64_t FileData::epoch() const {
  int64_t samples = 0;
  for (const auto &source : all)
    samples += source->epoch();
  return samples;
}

std::string FileData::fingerprint() const {
  std::string text = "order 1 seed " + (seed ? std::to_string(*seed) : "none");
  for (size_t i = 0; i < all.size(); ++i)
    text += "\n" + (weights.empty() ? "" : std::to_string(weights[i]) + " ") +
            all[i]->fingerprint();
  return hashBytes(text);
}

std::string FileData::describe() const {
  std::string text;
  for (size_t i = 0; i < std::min(all.size(), kDescribed); ++i) {
    char weight[32] = "";
    if (!weights.empty())
      std::snprintf(weight, sizeof(weight), "%g of ",
                    double(weights[i]) / double(kMillion));
    text += (i ? ", " : "") + std::string(weight) + all[i]->describe();
  }
  if (all.size() > kDescribed)
    text += " and " + std::to_string(all.size() - kDescribed) + " more";
  return oneLine(text + (seed ? ", shuffled by seed " + std::to_string(*seed)
                              : ", in order"));
}

} // namespace fsdp::runtime
