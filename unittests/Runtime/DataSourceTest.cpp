//===- DataSourceTest.cpp - batches and their errors ----------------------===//
#include "fsdp/Runtime/Files/DataSource.h"
#include "Support/Fixtures.h"
#include "Support/SamplePlan.h"
#include "fsdp/Runtime/Error.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp::test {
namespace {

using runtime::SafeTensors;
using testing::HasSubstr;

std::string errorOf(const Tensors &data) {
  ScratchDir dir;
  writeTensors(dir / "d", data);
  try {
    runtime::checkData(samplePlan(2), SafeTensors(dir / "d"));
  } catch (const runtime::InputError &error) {
    return error.what();
  }
  return "no error";
}

TEST(DataSource, TakesEachRanksSamplesAndWraps) {
  ScratchDir dir;
  Tensors tensors = sampleData(10);
  writeTensors(dir / "d", tensors);
  SafeTensors data(dir / "d");
  plan::Plan plan = samplePlan(3);
  for (int64_t step = 0; step < 4; ++step)
    for (int64_t rank = 0; rank < 3; ++rank) {
      auto inputs = runtime::stepInputs(plan, &data, 0, step, rank);
      at::Tensor rows = at::arange(kBatch) + (step * 3 + rank) * kBatch;
      rows = rows.remainder(10);
      EXPECT_TRUE(inputs.at(0).equal(tensors["x"].index_select(0, rows)));
      EXPECT_TRUE(inputs.at(1).equal(tensors["y"].index_select(0, rows)));
    }
}

TEST(DataSource, SyntheticDependsOnSeedStepAndRank) {
  plan::Plan plan = samplePlan(2);
  plan.inputs[0].spec.dtype = plan::DType::Int64;
  plan.inputs[0].low = 3;
  plan.inputs[0].high = 6;
  plan.inputs[0].spec.shape = {100, 3};
  auto first = runtime::stepInputs(plan, nullptr, 1, 2, 1);
  EXPECT_EQ(first.at(0).min().item<int64_t>(), 3);
  EXPECT_EQ(first.at(0).max().item<int64_t>(), 5);
  EXPECT_EQ(first.at(0).scalar_type(), at::kLong);
  EXPECT_EQ(first.at(1).scalar_type(), at::kFloat);
  auto same = runtime::stepInputs(plan, nullptr, 1, 2, 1);
  EXPECT_TRUE(first.at(1).equal(same.at(1)));
  for (auto [seed, step, rank] :
       {std::tuple(2, 2, 1), std::tuple(1, 3, 1), std::tuple(1, 2, 0)}) {
    auto other = runtime::stepInputs(plan, nullptr, uint64_t(seed), step, rank);
    EXPECT_FALSE(first.at(1).equal(other.at(1)));
  }
}

TEST(DataSource, NamesWhatIsWrong) {
  Tensors data = sampleData(8);
  EXPECT_EQ(errorOf(data), "no error");
  Tensors missing = data;
  missing.erase("y");
  EXPECT_THAT(errorOf(missing), HasSubstr("no tensor for input \"y\""));
  Tensors extra = data;
  extra["z"] = data["x"];
  EXPECT_THAT(errorOf(extra),
              HasSubstr("tensor \"z\" is no input of the plan, which has "
                        "\"x\", \"y\""));
  Tensors shape = data;
  shape["x"] = at::zeros({8, 4});
  EXPECT_THAT(errorOf(shape),
              HasSubstr("input \"x\": expected float32[4, 3] with any number "
                        "of samples in dim 0, got float32[8, 4]"));
  Tensors dtype = data;
  dtype["x"] = at::zeros({8, 3}, at::kLong);
  EXPECT_THAT(errorOf(dtype), HasSubstr("got int64[8, 3]"));
  Tensors empty = data;
  empty["x"] = at::zeros({0, 3});
  EXPECT_THAT(errorOf(empty), HasSubstr("at least one sample, got none"));
  Tensors scalar = data;
  scalar["x"] = at::zeros({});
  EXPECT_THAT(errorOf(scalar), HasSubstr("got float32[]"));
}

} // namespace
} // namespace fsdp::test
