//===- GradientClippingTest.cpp - norms over forked ranks -----------------===//
#include "fsdp/Runtime/Optimizer/GradientClipping.h"
#include "Support/Fixtures.h"
#include "fsdp/Runtime/Collectives/ShmComm.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace fsdp::test {
namespace {

using namespace runtime;

/// A plan that clips `params` vectors of `rows` rows; nothing else in it.
plan::Plan clippingPlan(int64_t worldSize, int64_t params, int64_t rows) {
  plan::Plan plan;
  plan.worldSize = worldSize;
  plan.units.push_back({"unit", {}, true});
  for (int64_t p = 0; p < params; ++p) {
    plan.params.push_back(
        {"p" + std::to_string(p), {}, {{rows}, plan::DType::Float32}, 0, true});
    plan.units[0].params.push_back(int32_t(p));
  }
  plan.instructions.push_back(
      {plan::ClipGradNorm(), plan::Phase::Optimizer, -1, {}});
  return plan;
}

void expect(bool condition, const std::string &what) {
  if (!condition)
    throw std::runtime_error(what);
}

class Clips : public testing::TestWithParam<double> {};

TEST_P(Clips, ByTheNormOfAllShards) {
  // Two rows over four ranks: the last two have empty shards.
  constexpr int64_t kRanks = 4, kParams = 3, kRows = 2;
  double normType = GetParam();
  plan::Plan plan = clippingPlan(kRanks, kParams, kRows);
  ShmSegment segment(plan);
  auto errors = forkRanks(kRanks, [&](int64_t rank) {
    ShmComm comm(plan, segment, rank);
    for (int64_t step = 0; step < 5; ++step) {
      comm.beginStep(step);
      at::Tensor whole =
          at::arange(1, kParams * kRows + 1, at::kFloat).mul(step + 1);
      std::vector<at::Tensor> shards;
      plan::RowRange rows = plan::shardRows(kRows, kRanks, rank);
      for (int64_t p = 0; p < kParams; ++p)
        shards.push_back(whole.narrow(0, p * kRows + rows.begin, rows.size()));
      at::Tensor norm = at::linalg_vector_norm(whole.to(at::kDouble), normType);
      // Of a shard, of a parameter and of all: up to six powers are added, and
      // a power and a root are off by two roundings each.
      constexpr int64_t kRoundings = 3 * (kParams * kRows + 4);
      for (double maxNorm : {2.0, 1000.0}) {
        ClippedGrads clipped = clipGradNorm(comm, shards, maxNorm, normType);
        expect(isRounded(clipped.norm, norm, norm, kRoundings), "norm");
        double factor = std::min(maxNorm / (norm.item<double>() + 1e-6), 1.0);
        for (size_t p = 0; p < size_t(kParams); ++p) {
          at::Tensor exact = shards[p].to(at::kDouble).mul(factor);
          // Beside the norm: 1e-6, a sum, a quotient, a product.
          expect(
              isRounded(clipped.grads[p], exact, exact.abs(), kRoundings + 4),
              "gradient");
        }
        std::vector<at::Tensor> written;
        for (const at::Tensor &shard : shards)
          written.push_back(shard.clone());
        std::vector<at::Tensor> same =
            clipGradNorm(comm, written, maxNorm, normType, /*inPlace=*/true)
                .grads;
        for (size_t p = 0; p < size_t(kParams); ++p)
          expect(same[p].is_same(written[p]) &&
                     at::equal(same[p], clipped.grads[p]),
                 "gradient in place");
      }
    }
  });
  for (const std::string &error : errors)
    EXPECT_EQ(error, "");
}

INSTANTIATE_TEST_SUITE_P(Norms, Clips, testing::Values(1.0, 2.0, INFINITY));

TEST(GradientClipping, NaNOfOneRankReachesAll) {
  plan::Plan plan = clippingPlan(2, 1, 2);
  for (double normType : {1.0, 2.0, double(INFINITY)}) {
    ShmSegment segment(plan);
    auto errors = forkRanks(2, [&](int64_t rank) {
      ShmComm comm(plan, segment, rank);
      comm.beginStep(0);
      float value = rank == 0 ? std::numeric_limits<float>::quiet_NaN() : 1.f;
      ClippedGrads clipped =
          clipGradNorm(comm, {at::tensor({value})}, 1.0, normType);
      expect(std::isnan(clipped.norm.item<double>()), "norm");
      expect(std::isnan(clipped.grads[0].item<double>()), "gradient");
    });
    for (const std::string &error : errors)
      EXPECT_EQ(error, "");
  }
}

} // namespace
} // namespace fsdp::test
