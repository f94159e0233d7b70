//===- DataSource.cpp - the inputs of each step ---------------------------===//
#include "fsdp/Runtime/Files/DataSource.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Memory/Layout.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>

#include <cstring>

namespace fsdp::runtime {

namespace {

/// One round of SplitMix64, to spread neighbouring seeds.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

at::Tensor sampleRows(const SafeTensors::Entry &entry, const plan::Input &input,
                      int64_t first) {
  at::Tensor batch = at::empty(input.spec.shape, scalarType(input.spec.dtype));
  int64_t samples = entry.spec.shape[0];
  int64_t rows = input.spec.shape[0];
  if (batch.numel() == 0)
    return batch;
  auto bytes = size_t(input.spec.numBytes() / rows);
  auto *to = static_cast<std::byte *>(batch.mutable_data_ptr());
  for (int64_t i = 0; i < rows; ++i)
    std::memcpy(to + size_t(i) * bytes,
                entry.data.data() + size_t((first + i) % samples) * bytes,
                bytes);
  return batch;
}

} // namespace

void checkData(const plan::Plan &plan, const SafeTensors &data) {
  std::string wanted;
  for (const plan::Input &input : plan.inputs)
    wanted += (wanted.empty() ? "\"" : ", \"") + input.name + "\"";
  for (const auto &[name, entry] : data.entries()) {
    bool known = false;
    for (const plan::Input &input : plan.inputs)
      known |= input.name == name;
    if (!known)
      throw InputError(data.path() + ": tensor \"" + name +
                       "\" is no input of the plan, which has " +
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

std::vector<at::Tensor> stepInputs(const plan::Plan &plan,
                                   const SafeTensors *data, uint64_t seed,
                                   int64_t step, int64_t rank) {
  std::vector<at::Tensor> inputs;
  at::Generator generator = at::detail::createCPUGenerator(
      mix(mix(mix(seed) + uint64_t(step)) + uint64_t(rank)));
  for (const plan::Input &input : plan.inputs) {
    at::ScalarType dtype = scalarType(input.spec.dtype);
    if (data) {
      int64_t batch = input.spec.shape[0];
      inputs.push_back(sampleRows(data->entries().at(input.name), input,
                                  (step * plan.worldSize + rank) * batch));
    } else if (at::isComplexType(dtype)) {
      inputs.push_back(
          at::randn(input.spec.shape, generator, at::kComplexFloat).to(dtype));
    } else if (at::isFloatingType(dtype)) {
      inputs.push_back(
          at::randn(input.spec.shape, generator, at::kFloat).to(dtype));
    } else {
      inputs.push_back(at::randint(input.low, input.high, input.spec.shape,
                                   generator, at::kLong)
                           .to(dtype));
    }
  }
  return inputs;
}

} // namespace fsdp::runtime
