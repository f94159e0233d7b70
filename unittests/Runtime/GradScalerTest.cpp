//===- GradScalerTest.cpp - loss scaling over forked ranks ----------------===//
#include "fsdp/Runtime/Optimizer/GradScaler.h"
#include "Support/Fixtures.h"
#include "fsdp/Runtime/Collectives/ShmComm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <limits>

namespace fsdp::test {
namespace {

using namespace runtime;

/// A plan that unscales one vector of two rows; nothing else in it.
plan::Plan scalingPlan(int64_t worldSize) {
  plan::Plan plan;
  plan.worldSize = worldSize;
  plan.gradScaler = plan::GradScaler{8, 4, 0.25, 2};
  plan.units.push_back({"unit", {0}, true});
  plan.params.push_back({"p", {}, {{2}, plan::DType::Float32}, 0, true});
  plan.instructions.push_back(
      {plan::Unscale(), plan::Phase::Optimizer, -1, {}});
  return plan;
}

void expect(bool condition, const std::string &what) {
  if (!condition)
    throw std::runtime_error(what);
}

TEST(GradScaler, InfinityOfOneRankReachesAll) {
  // The third and fourth rank have empty shards.
  plan::Plan plan = scalingPlan(4);
  ShmSegment segment(plan);
  auto errors = forkRanks(4, [&](int64_t rank) {
    ShmComm comm(plan, segment, rank);
    GradScaler scaler(*plan.gradScaler);
    // Two finite steps let the scale grow, an infinite one backs it off.
    const float scales[] = {8, 8, 32, 8, 8, 32};
    for (int64_t step = 0; step < 6; ++step) {
      comm.beginStep(step);
      float scale = scaler.scale().item<float>();
      expect(scale == scales[step], "scale");
      bool finite = step != 2;
      at::Tensor shard = rank < 2 ? at::full({1}, 3 * scale, at::kFloat)
                                  : at::empty({0}, at::kFloat);
      if (!finite && rank == 1)
        shard.fill_(std::numeric_limits<float>::infinity());
      std::vector<at::Tensor> out = scaler.unscale(comm, {shard}, false);
      expect(scaler.foundInf() == !finite, "found");
      if (rank == 0)
        expect(out[0].item<float>() == 3, "unscaled");
      scaler.update();
      expect(!scaler.foundInf(), "a new step has found nothing");
    }
  });
  for (const std::string &error : errors)
    EXPECT_EQ(error, "");
}

TEST(GradScaler, OfOneRankLeavesItsArgumentsAlone) {
  plan::Plan plan = scalingPlan(1);
  ShmSegment segment(plan);
  ShmComm comm(plan, segment, 0);
  comm.beginStep(0);
  GradScaler scaler(*plan.gradScaler);
  // Two gradients that are one tensor.
  at::Tensor grad = at::full({2}, 16, at::kFloat);
  auto out = scaler.unscale(comm, {grad, grad}, false);
  EXPECT_TRUE(out[0].equal(at::full({2}, 2, at::kFloat)));
  EXPECT_TRUE(out[1].equal(out[0]));
  EXPECT_TRUE(grad.equal(at::full({2}, 16, at::kFloat)));
}

TEST(GradScaler, DeferredLooksOnly) {
  plan::Plan plan = scalingPlan(1);
  ShmSegment segment(plan);
  ShmComm comm(plan, segment, 0);
  comm.beginStep(0);
  GradScaler scaler(*plan.gradScaler);
  at::Tensor grad =
      at::full({2}, std::numeric_limits<float>::quiet_NaN(), at::kFloat);
  scaler.unscale(comm, {grad}, true);
  EXPECT_TRUE(scaler.foundInf());
  grad.fill_(16);
  EXPECT_TRUE(scaler.unscale(comm, {grad}, true)[0].equal(grad));
  EXPECT_FALSE(scaler.foundInf());
}

} // namespace
} // namespace fsdp::test
