//===- DataSource.cpp - random inputs -------------------------------------===//
#include "fsdp/Runtime/Files/DataSource.h"
#include "fsdp/Runtime/Files/SafeTensors.h"
#include "fsdp/Runtime/Files/SampleOrder.h"
#include "fsdp/Runtime/Memory/Layout.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>

namespace fsdp::runtime {

int64_t batchSize(const plan::Plan &plan) {
  for (const plan::Input &input : plan.inputs)
    if (!input.spec.shape.empty() && input.spec.shape[0] > 0)
      return input.spec.shape[0];
  return 1;
}

int64_t samplesPerMicrobatch(const plan::Plan &plan) {
  return plan.worldSize * batchSize(plan);
}

namespace {

class SyntheticData final : public DataSource {
public:
  SyntheticData(const plan::Plan &plan, uint64_t seed)
      : plan(plan), seed(seed) {}

  std::vector<at::Tensor> inputs(int64_t first, int64_t rank) const override {
    int64_t microbatch = first / samplesPerMicrobatch(plan);
    at::Generator generator = at::detail::createCPUGenerator(mixBits(
        mixBits(mixBits(seed) + uint64_t(microbatch)) + uint64_t(rank)));
    std::vector<at::Tensor> batch;
    for (const plan::Input &input : plan.inputs)
      batch.push_back(draw(input, generator));
    return batch;
  }
  int64_t epoch() const override { return 0; }
  std::string fingerprint() const override { return hashBytes(describe()); }
  std::string describe() const override {
    return "random inputs of seed " + std::to_string(seed);
  }

private:
  static at::Tensor draw(const plan::Input &input, at::Generator &generator) {
    at::ScalarType dtype = scalarType(input.spec.dtype);
    if (at::isComplexType(dtype))
      return at::randn(input.spec.shape, generator, at::kComplexFloat)
          .to(dtype);
    if (at::isFloatingType(dtype))
      return at::randn(input.spec.shape, generator, at::kFloat).to(dtype);
    return at::randint(input.low, input.high, input.spec.shape, generator,
                       at::kLong)
        .to(dtype);
  }

  const plan::Plan &plan;
  uint64_t seed;
};

} // namespace

std::unique_ptr<DataSource> makeSyntheticData(const plan::Plan &plan,
                                              uint64_t seed) {
  return std::make_unique<SyntheticData>(plan, seed);
}

} // namespace fsdp::runtime
