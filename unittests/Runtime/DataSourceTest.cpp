//===- DataSourceTest.cpp - batches by position, and their errors ---------===//
#include "fsdp/Runtime/Files/DataSource.h"
#include "Support/Fixtures.h"
#include "Support/HostProxy.h"
#include "Support/SamplePlan.h"
#include "fsdp/Runtime/Devices/Device.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Files/OpenData.h"
#include "fsdp/Runtime/Files/Prefetcher.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

namespace fsdp::test {
namespace {

using runtime::DataOptions;
using runtime::FileData;
using runtime::samplesPerMicrobatch;
using testing::HasSubstr;

std::unique_ptr<FileData> open(const plan::Plan &plan,
                               const DataOptions &options) {
  return runtime::openData(plan, options).training;
}

std::string errorOf(const Tensors &data) {
  ScratchDir dir;
  writeTensors(dir / "d", data);
  plan::Plan plan = samplePlan(2);
  try {
    open(plan, {.sources = {dir / "d"}});
  } catch (const runtime::InputError &error) {
    return error.what();
  }
  return "no error";
}

TEST(DataSource, TakesEachRanksSamplesAndWraps) {
  ScratchDir dir;
  Tensors tensors = sampleData(10);
  writeTensors(dir / "d", tensors);
  plan::Plan plan = samplePlan(3);
  auto data = open(plan, {.sources = {dir / "d"}});
  EXPECT_EQ(data->epoch(), 10);
  for (int64_t step = 0; step < 4; ++step)
    for (int64_t rank = 0; rank < 3; ++rank) {
      auto inputs = data->inputs(step * samplesPerMicrobatch(plan), rank);
      at::Tensor rows = at::arange(kBatch) + (step * 3 + rank) * kBatch;
      rows = rows.remainder(10);
      EXPECT_TRUE(inputs.at(0).equal(tensors["x"].index_select(0, rows)));
      EXPECT_TRUE(inputs.at(1).equal(tensors["y"].index_select(0, rows)));
    }
}

TEST(DataSource, WrapsInputsOfDifferentLengthEachByItself) {
  ScratchDir dir;
  Tensors tensors = sampleData(10);
  tensors["y"] = tensors["y"].slice(0, 0, 7).contiguous();
  writeTensors(dir / "d", tensors);
  plan::Plan plan = samplePlan(2);
  DataOptions options{.sources = {dir / "d"}};
  auto data = open(plan, options);
  EXPECT_EQ(data->epoch(), 4); // whole batches of y
  auto inputs = data->inputs(8, 1);
  at::Tensor rows = at::arange(kBatch) + 12;
  EXPECT_TRUE(
      inputs.at(0).equal(tensors["x"].index_select(0, rows.remainder(10))));
  EXPECT_TRUE(
      inputs.at(1).equal(tensors["y"].index_select(0, rows.remainder(7))));
  options.shuffleSeed = 1;
  EXPECT_THROW(open(plan, options), runtime::InputError);
  EXPECT_THROW(open(plan, {.sources = {dir / "d"}, .evalSplit = "0.5"}),
               runtime::InputError);
}

TEST(DataSource, TakesWholeBatchesOfInputsWithOtherRows) {
  ScratchDir dir;
  plan::Plan plan = samplePlan(2);
  plan.inputs[1].spec.shape = {2, kOutputs};
  Tensors tensors = sampleData(8);
  writeTensors(dir / "d", tensors);
  auto data = open(plan, {.sources = {dir / "d"}});
  auto inputs = data->inputs(8, 1); // the batch of number 3
  EXPECT_TRUE(inputs.at(0).equal(tensors["x"].slice(0, 4, 8)));
  EXPECT_TRUE(inputs.at(1).equal(tensors["y"].slice(0, 6, 8)));
  EXPECT_THROW(data->inputs(2, 0), runtime::RunError);
}

TEST(DataSource, SyntheticDependsOnSeedStepAndRank) {
  plan::Plan plan = samplePlan(2);
  plan.inputs[0].spec.dtype = plan::DType::Int64;
  plan.inputs[0].low = 3;
  plan.inputs[0].high = 6;
  plan.inputs[0].spec.shape = {100, 3};
  auto inputsOf = [&](uint64_t seed, int64_t microbatch, int64_t rank) {
    return runtime::makeSyntheticData(plan, seed)
        ->inputs(microbatch * samplesPerMicrobatch(plan), rank);
  };
  auto first = inputsOf(1, 2, 1);
  EXPECT_EQ(first.at(0).min().item<int64_t>(), 3);
  EXPECT_EQ(first.at(0).max().item<int64_t>(), 5);
  EXPECT_EQ(first.at(0).scalar_type(), at::kLong);
  EXPECT_EQ(first.at(1).scalar_type(), at::kFloat);
  EXPECT_TRUE(first.at(1).equal(inputsOf(1, 2, 1).at(1)));
  EXPECT_FALSE(first.at(1).equal(inputsOf(2, 2, 1).at(1)));
  EXPECT_FALSE(first.at(1).equal(inputsOf(1, 3, 1).at(1)));
  EXPECT_FALSE(first.at(1).equal(inputsOf(1, 2, 0).at(1)));
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
              HasSubstr("tensor \"z\" is not an input of the plan, which has "
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

TEST(DataSource, ShufflesAndSplitsTensors) {
  ScratchDir dir;
  Tensors tensors = sampleData(10);
  writeTensors(dir / "d", tensors);
  plan::Plan plan = samplePlan(1);
  runtime::TrainingData data = runtime::openData(
      plan, {.sources = {dir / "d"}, .shuffleSeed = 3, .evalSplit = "0.2"});
  EXPECT_EQ(data.training->epoch(), 8);
  EXPECT_EQ(data.heldOut->epoch(), 2);
  at::Tensor epoch = at::cat(
      {data.training->inputs(0, 0).at(0), data.training->inputs(4, 0).at(0)});
  at::Tensor want = tensors["x"].slice(0, 0, 8);
  EXPECT_FALSE(epoch.equal(want));
  EXPECT_TRUE(std::get<0>(at::sort(epoch.flatten()))
                  .equal(std::get<0>(at::sort(want.flatten()))));
  at::Tensor rows = at::arange(kBatch).remainder(2) + 8;
  EXPECT_TRUE(data.heldOut->inputs(0, 0).at(0).equal(
      tensors["x"].index_select(0, rows)));
}

TEST(DataSource, NoticesFilesThatChangeUnderTheRun) {
  ScratchDir dir;
  writeTensors(dir / "d", sampleData(10));
  plan::Plan plan = samplePlan(1);
  auto errorAfter =
      [&](const std::function<void(const std::string &)> &change) {
        writeTensors(dir / "e", sampleData(10));
        auto data = open(plan, {.sources = {dir / "e"}});
        data->inputs(0, 0);
        change(dir / "e");
        try {
          data->inputs(0, 0);
        } catch (const runtime::RunError &error) {
          return std::string(error.what());
        }
        return std::string("no error");
      };
  using namespace std::filesystem;
  EXPECT_THAT(errorAfter([](const std::string &path) {
                resize_file(path, file_size(path) - 1);
              }),
              HasSubstr("e: changed while the run reads it: expected "));
  EXPECT_THAT(errorAfter([](const std::string &path) { resize_file(path, 1); }),
              HasSubstr(", got 1"));
  EXPECT_THAT(errorAfter([](const std::string &path) {
                last_write_time(path, last_write_time(path) +
                                          std::chrono::seconds(1));
              }),
              HasSubstr("written to after it was opened"));
  // Another file in its place is not the one that was opened.
  EXPECT_EQ(errorAfter([&](const std::string &path) {
              writeText(dir / "f", "");
              rename(dir / "f", path);
            }),
            "no error");
}

TEST(DataSource, FingerprintsTellDataAndOrderApart) {
  ScratchDir dir;
  plan::Plan two = samplePlan(2), three = samplePlan(3);
  writeTensors(dir / "d", sampleData(10));
  std::filesystem::copy(dir / "d", dir / "moved");
  Tensors other = sampleData(10);
  other["x"][9][2] += 1;
  writeTensors(dir / "other", other);
  auto of = [&](const plan::Plan &plan, const DataOptions &options) {
    return open(plan, options)->fingerprint();
  };
  std::string own = of(two, {.sources = {dir / "d"}});
  EXPECT_EQ(own, of(two, {.sources = {dir / "moved"}}));
  EXPECT_EQ(own, of(three, {.sources = {dir / "d"}}));
  std::set<std::string> all = {
      own,
      of(two, {.sources = {dir / "other"}}),
      of(two, {.sources = {dir / "d"}, .shuffleSeed = 0}),
      of(two, {.sources = {dir / "d"}, .shuffleSeed = 1}),
      of(two, {.sources = {dir / "d"}, .evalSplit = "0.5"}),
      of(two, {.sources = {dir / "d", dir / "d"}}),
      of(two, {.sources = {"1:" + (dir / "d"), "2:" + (dir / "d")}}),
      runtime::makeSyntheticData(two, 0)->fingerprint(),
      runtime::makeSyntheticData(two, 1)->fingerprint()};
  EXPECT_EQ(all.size(), 9u);
}

TEST(Prefetcher, GivesWhatTheSourceGives) {
  ScratchDir dir;
  writeTensors(dir / "d", sampleData(10));
  plan::Plan plan = samplePlan(2);
  auto data = open(plan, {.sources = {dir / "d"}, .shuffleSeed = 5});
  auto device = runtime::makeCpuDevice();
  runtime::Prefetcher prefetcher(plan, *data, 1, *device);
  // In order, then elsewhere, and on from there.
  for (int64_t first : {0, 8, 16, 24, 80, 88, 0, 8, 8}) {
    auto got = prefetcher.next(first), want = data->inputs(first, 1);
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i)
      EXPECT_TRUE(got[i].equal(want[i])) << first;
  }
}

/// A device with memory of its own: batches are views then.
class Elsewhere final : public HostProxy {
public:
  c10::Device where() const override { return c10::DeviceType::Meta; }
};

TEST(Prefetcher, GivesViewsOfHostMemoryToOtherDevices) {
  ScratchDir dir;
  writeTensors(dir / "d", sampleData(10));
  plan::Plan plan = samplePlan(2);
  auto data = open(plan, {.sources = {dir / "d"}});
  Elsewhere device;
  runtime::Prefetcher prefetcher(plan, *data, 0, device);
  std::set<const void *> places;
  for (int64_t first = 0; first < 80; first += samplesPerMicrobatch(plan)) {
    auto got = prefetcher.next(first), want = data->inputs(first, 0);
    places.insert(got.at(0).const_data_ptr());
    for (size_t i = 0; i < got.size(); ++i)
      EXPECT_TRUE(got[i].equal(want[i])) << first;
  }
  EXPECT_EQ(places.size(), 2u);
}

TEST(Prefetcher, FailsOnlyWhereItsBatchIsTaken) {
  ScratchDir dir;
  plan::Plan plan = samplePlan(1);
  plan.inputs[1].spec.shape = {2, kOutputs};
  writeTensors(dir / "d", sampleData(8));
  auto data = open(plan, {.sources = {dir / "d"}});
  auto device = runtime::makeCpuDevice();
  runtime::Prefetcher prefetcher(plan, *data, 0, *device);
  EXPECT_THROW(prefetcher.next(2), runtime::RunError);
  EXPECT_TRUE(prefetcher.next(4).at(0).equal(data->inputs(4, 0).at(0)));
  // What is read ahead when the file is cut is not taken.
  std::filesystem::resize_file(dir / "d", 10);
  EXPECT_THROW(prefetcher.next(400), runtime::RunError);
}

} // namespace
} // namespace fsdp::test
