//===- WeightFilesTest.cpp - published checkpoints ------------------------===//
#include "fsdp/Runtime/Files/WeightFiles.h"
#include "Support/Fixtures.h"
#include "Support/SamplePlan.h"
#include "fsdp/Runtime/Error.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp::test {
namespace {

using runtime::WeightFiles;
using testing::HasSubstr;

plan::Param param(std::string name, std::vector<int64_t> shape,
                  std::vector<std::string> aliases = {}) {
  plan::Param result;
  result.name = std::move(name);
  result.aliases = std::move(aliases);
  result.spec = {std::move(shape), plan::DType::Float32};
  result.unit = 0;
  return result;
}

at::Tensor read(const WeightFiles &files, const plan::Param &param,
                int64_t begin, int64_t rows) {
  std::vector<int64_t> shape = param.spec.shape;
  shape[0] = rows;
  at::Tensor to = at::zeros(shape);
  files.read(param, begin, to);
  return to;
}

class Weights : public testing::Test {
protected:
  /// "a" and "h.b" in two files behind an index.
  void writeIndex() {
    writeTensors(dir / "1.safetensors", {{"a", a}});
    writeTensors(dir / "2.safetensors", {{"h.b", b}});
    writeText(dir / "model.safetensors.index.json",
              R"({"metadata": {"total_size": 64}, "weight_map":
                  {"a": "1.safetensors", "h.b": "2.safetensors"}})");
  }

  at::Tensor a = at::rand({5, 2}), b = at::rand({3});
  ScratchDir dir;
};

TEST_F(Weights, AreReadThroughAnIndex) {
  writeIndex();
  WeightFiles files(dir / "model.safetensors.index.json");
  EXPECT_TRUE(read(files, param("a", {5, 2}), 2, 3).equal(a.slice(0, 2)));
  EXPECT_TRUE(read(files, param("h.b", {3}), 0, 3).equal(b));
  EXPECT_EQ(read(files, param("a", {5, 2}), 5, 0).numel(), 0);
}

TEST_F(Weights, AreFoundByOtherNames) {
  writeIndex();
  WeightFiles files(dir / "model.safetensors.index.json");
  EXPECT_TRUE(read(files, param("head", {3}, {"h.b"}), 0, 3).equal(b));
  // The base model's names lack the first segment.
  EXPECT_TRUE(read(files, param("model.h.b", {3}), 0, 3).equal(b));
  // Not where some name has it.
  EXPECT_THAT(errorOf([&] { read(files, param("h.a", {5, 2}), 0, 5); }),
              HasSubstr("no tensor for parameter \"h.a\""));
}

TEST_F(Weights, AreConverted) {
  at::Tensor wide = a.to(at::kDouble);
  runtime::OutputFile file(dir / "t");
  runtime::writeSafeTensors(
      file, {{"a",
              {{5, 2}, plan::DType::Float64},
              {static_cast<const std::byte *>(wide.const_data_ptr()),
               wide.nbytes()}}});
  EXPECT_TRUE(read(WeightFiles(dir / "t"), param("a", {5, 2}), 1, 4)
                  .equal(a.slice(0, 1)));
}

TEST_F(Weights, OfAnotherShapeAreRefused) {
  writeTensors(dir / "t", {{"a", a}, {"n", at::arange(3)}});
  WeightFiles files(dir / "t");
  EXPECT_THAT(errorOf([&] { read(files, param("a", {4, 2}), 0, 4); }),
              HasSubstr("expected float32[4, 2], got float32[5, 2]"));
  EXPECT_THAT(errorOf([&] { read(files, param("n", {3}), 0, 3); }),
              HasSubstr("expected float32[3], got int64[3]"));
}

TEST_F(Weights, NameWhatIsWrongWithAnIndex) {
  writeIndex();
  std::string path = dir / "x.json";
  auto error = [&](const std::string &text) {
    writeText(path, text);
    return errorOf([&] { WeightFiles files(path); });
  };
  EXPECT_THAT(errorOf([&] { WeightFiles files(dir / "none.json"); }),
              HasSubstr("none.json: cannot be read: No such file"));
  for (const char *text : {"", "{"})
    EXPECT_THAT(error(text), HasSubstr("x.json: not valid json at byte"));
  std::string deep = R"({"weight_map": )";
  for (int i = 0; i < 300000; ++i)
    deep += R"({"a": )";
  EXPECT_THAT(error(deep), HasSubstr("x.json: nested deeper than 64"));
  for (const char *text : {"[]", "{}", R"({"weight_map": {}})"})
    EXPECT_THAT(error(text), HasSubstr("expected a json object with"));
  EXPECT_THAT(error(R"({"weight_map": {"a": 1}})"),
              HasSubstr("expected a file name for \"a\", got 1"));
  EXPECT_THAT(error(R"({"weight_map": {"a": "3.safetensors"}})"),
              HasSubstr("3.safetensors"));
  EXPECT_THAT(error(R"({"weight_map": {"z": "1.safetensors"}})"),
              HasSubstr("tensor \"z\" is not in "));
}

TEST_F(Weights, WithoutBuffersLeaveTheCaptures) {
  plan::Plan plan = samplePlan(2);
  plan.buffers[0].persistent = false;
  writeSample(dir, plan);
  Tensors weights = sampleWeights();
  for (auto &[name, tensor] : weights)
    tensor = tensor + 1;
  weights.erase("shift");
  writeTensors(dir / "other.safetensors", weights);
  auto run = [&] {
    return runTool({dir / "plan.json", "--steps", "1", "--weights",
                    dir / "other.safetensors", "--save-weights", dir / "out"});
  };
  ASSERT_EQ(run().status, 0);
  Tensors fromCapture = readTensors(dir / "out");
  weights["shift"] = sampleWeights()["shift"];
  writeTensors(dir / "other.safetensors", weights);
  ASSERT_EQ(run().status, 0);
  for (const auto &[name, tensor] : readTensors(dir / "out"))
    EXPECT_TRUE(tensor.equal(fromCapture.at(name))) << name;

  // Or those of the initialisation.
  addInit(plan);
  writeText(dir / "plan.json", plan::printPlan(plan));
  weights.erase("shift");
  writeTensors(dir / "other.safetensors", weights);
  ASSERT_EQ(run().status, 0);
  plan.init.clear();
  writeText(dir / "plan.json", plan::printPlan(plan));
  ToolResult refused = run();
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.err, HasSubstr("no tensor for buffer \"shift\""));
}

} // namespace
} // namespace fsdp::test
