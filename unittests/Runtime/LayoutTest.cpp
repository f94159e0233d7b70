//===- LayoutTest.cpp - strides of a plan in a run ------------------------===//
#include "fsdp/Runtime/Memory/Layout.h"
#include "Support/Fixtures.h"
#include "Support/SamplePlan.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Operators/CallTable.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp::test {
namespace {

using namespace plan;
using runtime::CallTable;
using runtime::copyLaidOut;
using runtime::emptyLaidOut;
using runtime::isLaidOut;
using runtime::laidOut;
using testing::AllOf;
using testing::HasSubstr;

at::Tensor counted(at::IntArrayRef shape) {
  return at::arange(c10::multiply_integers(shape), at::kFloat).reshape(shape);
}

TEST(Layout, LaysOutAsThePlanSays) {
  at::Tensor rows = counted({2, 3});
  EXPECT_TRUE(laidOut(rows, {}, at::kCPU).is_same(rows));
  at::Tensor columns = laidOut(rows, {1, 2}, at::kCPU);
  EXPECT_EQ(columns.strides(), at::IntArrayRef({1, 2}));
  EXPECT_TRUE(columns.equal(rows));
  EXPECT_TRUE(laidOut(columns, {1, 2}, at::kCPU).is_same(columns));
  EXPECT_EQ(laidOut(columns, {}, at::kCPU).strides(), at::IntArrayRef({3, 1}));
  // Strides of one element lead nowhere.
  EXPECT_TRUE(isLaidOut(counted({1, 3}), {7, 1}));
}

TEST(Layout, AnExpandedBufferHasItsElementsOnce) {
  at::Tensor buffer =
      emptyLaidOut({{2, 4, 3}, DType::Float32}, {3, 0, 1}, at::kCPU);
  EXPECT_EQ(buffer.storage().nbytes(), 6 * sizeof(float));
  at::Tensor whole = counted({2, 1, 3}).expand({2, 4, 3}).contiguous();
  copyLaidOut(buffer, whole, "b");
  EXPECT_TRUE(buffer.equal(whole));
  whole[0][2][1] = 7;
  try {
    copyLaidOut(buffer, whole, "b");
    FAIL() << "no error";
  } catch (const runtime::InputError &error) {
    EXPECT_EQ(std::string(error.what()),
              "b: expected the same elements along dimensions of stride 0, got "
              "others");
  }
}

/// A plan of a transposition and what takes its result.
struct Strided {
  Plan plan;
  std::vector<at::Tensor> values;

  Strided(Call use, Strides of) {
    plan.modules = {"layer"};
    plan.lines = {"models/tiny.py:12"};
    plan.values = {Value({2, 3}, DType::Float32), Value({3, 2}, DType::Float32),
                   Value({6}, DType::Float32)};
    plan.values[1].strides = std::move(of);
    plan.instructions.push_back(
        {Call{{"aten::t", ""}, {{TensorArg{0}}}, {1}}, Phase::Forward, 0, {}});
    plan.instructions[0].line = 0;
    plan.instructions.push_back({std::move(use), Phase::Forward, 0, {}});
    values.resize(3);
    values[0] = counted({2, 3});
  }

  std::string run() {
    CallTable table(plan, plan.instructions);
    try {
      for (size_t i = 0; i < plan.instructions.size(); ++i)
        table.run(i, std::get<Call>(plan.instructions[i].kind), values);
    } catch (const std::exception &error) {
      return error.what();
    }
    return "";
  }
};

Call asStrided() {
  return {"aten::as_strided",
          "",
          {{TensorArg{1}},
           {ArgList{{int64_t(6)}}},
           {ArgList{{int64_t(1)}}},
           {NoneArg{}}},
          {2}};
}
Call view() {
  return {"aten::view", "", {{TensorArg{1}}, {ArgList{{int64_t(6)}}}}, {2}};
}
Call sum() { return {"aten::sum", "", {{TensorArg{1}}, {NoneArg{}}}, {2}}; }

constexpr const char *kStray =
    "the result of aten::t in module \"layer\" at models/tiny.py:12, expected "
    "with strides [2, 1] as captured, got [1, 3]";

TEST(StrideCheck, ReadingByOtherStridesThanCapturedIsAnError) {
  Strided as(asStrided(), {1, 3});
  EXPECT_EQ(as.run(), "");
  EXPECT_TRUE(as.values[2].equal(counted({6})));
  EXPECT_EQ(Strided(asStrided(), {}).run(),
            std::string("reads by strides ") + kStray);
}

TEST(StrideCheck, AnErrorSaysWhatHasOtherStrides) {
  std::string expected = Strided(view(), {1, 3}).run();
  EXPECT_THAT(expected, HasSubstr("view size is not compatible"));
  EXPECT_THAT(expected, testing::Not(HasSubstr("as captured")));
  EXPECT_THAT(Strided(view(), {}).run(),
              AllOf(HasSubstr("view size is not compatible"),
                    HasSubstr(std::string("; it takes ") + kStray)));
}

TEST(StrideCheck, WhatDependsOnNoStridesRuns) {
  Strided other(sum(), {});
  EXPECT_EQ(other.run(), "");
  EXPECT_EQ(other.values[2].item<float>(), 15);
}

TEST(CallTable, AMaskWithOtherValuesThanCapturedIsAnError) {
  Plan plan;
  plan.values = {Value({4}, DType::Float32), Value({4}, DType::Bool),
                 Value({2}, DType::Float32)};
  Call index{"aten::index",
             "Tensor",
             {{TensorArg{0}}, {ArgList{{TensorArg{1}}}}},
             {2}};
  plan.instructions.push_back({index, Phase::Forward, -1, {}});
  CallTable table(plan, plan.instructions);
  std::vector<at::Tensor> values(3);
  values[0] = counted({4});
  // In any step, not the first alone.
  for (float threshold : {1.5f, 0.5f}) {
    values[1] = values[0].gt(threshold);
    if (threshold > 1)
      table.run(0, index, values);
    else
      EXPECT_THAT([&] { table.run(0, index, values); },
                  testing::ThrowsMessage<runtime::RunError>(HasSubstr(
                      "expected a result of shape [2] as captured, got [3]")));
  }
}

/// A step from columns is that from rows: losses are the same.
TEST(Layout, FsdpRunLaysOutInputsAndBuffers) {
  ScratchDir dir;
  Plan plan = samplePlan(2);
  writeSample(dir, plan);
  auto lossesOf = [&] {
    ToolResult result =
        runTool({dir / "plan.json", "--nproc", "2", "--steps", "2", "--data",
                 dir / "data.safetensors", "--metrics", dir / "m.jsonl"});
    EXPECT_EQ(result.status, 0) << result.err;
    std::string text = readText(dir / "m.jsonl");
    return text.substr(0, text.find("\"step_ms\""));
  };
  std::string rows = lossesOf();
  plan.inputs[0].strides = {1, plan.inputs[0].spec.shape[0]};
  // Reads the input by columns: right where it lies so.
  auto &mm = std::get<Call>(plan.instructions[find<Call>(plan)].kind);
  plan.values.push_back(plan.values[size_t(plan.inputs[0].value)]);
  auto read = ValueId(plan.values.size()) - 1;
  plan.values[size_t(read)].storage = plan.inputs[0].value;
  plan.values[size_t(read)].strides = plan.inputs[0].strides;
  ArgList shape, strides;
  for (int64_t extent : plan.inputs[0].spec.shape)
    shape.push_back({extent});
  for (int64_t stride : plan.inputs[0].strides)
    strides.push_back({stride});
  Call asStrided{
      "aten::as_strided",
      "",
      {{TensorArg{plan.inputs[0].value}}, {shape}, {strides}, {NoneArg{}}},
      {read}};
  mm.args[0] = {TensorArg{read}};
  plan.instructions.insert(plan.instructions.begin() + long(find<Call>(plan)),
                           {asStrided, Phase::Forward, 0, {}});
  writeText(dir / "plan.json", printPlan(plan));
  EXPECT_EQ(lossesOf(), rows);
}

} // namespace
} // namespace fsdp::test
