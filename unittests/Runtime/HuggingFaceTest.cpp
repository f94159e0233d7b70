//===- HuggingFaceTest.cpp - model folders, and maps of names -------------===//
#include "fsdp/Runtime/Checkpoint/HuggingFace.h"
#include "Support/Fixtures.h"
#include "fsdp/Runtime/Error.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>

namespace fsdp::test {
namespace {

using runtime::NameMap;
using runtime::SavedState;
using runtime::SavedTensor;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::UnorderedElementsAre;

class HuggingFace : public testing::Test {
protected:
  /// Adds a tensor of float32 in two chunks of rows.
  void add(const std::string &name, const at::Tensor &tensor) {
    memory.push_back(tensor);
    std::span<const std::byte> bytes(
        static_cast<const std::byte *>(tensor.const_data_ptr()),
        tensor.nbytes());
    int64_t rows = tensor.size(0) - 1;
    size_t first = tensor.nbytes() * size_t(rows) / size_t(tensor.size(0));
    std::vector<int64_t> shape = tensor.sizes().vec(), low = shape,
                         high = shape, offsets(shape.size(), 0);
    low[0] = rows;
    high[0] = 1;
    SavedTensor &saved = state.tensors[name];
    saved.spec = {shape, plan::DType::Float32};
    saved.chunks.push_back({{offsets, low}, bytes.first(first), "0"});
    offsets[0] = rows;
    saved.chunks.push_back({{offsets, high}, bytes.subspan(first), "1"});
  }

  NameMap map(const std::string &json) {
    writeText(dir / "map.json", json);
    return NameMap(dir / "map.json");
  }

  std::string write(const NameMap *names = nullptr) {
    return errorOf(
        [&] { leftOut = runtime::writeHuggingFace(folder, state, names, 40); });
  }
  std::string readError() {
    return errorOf([&] { runtime::readHuggingFace(folder, nullptr); });
  }

  ScratchDir dir;
  std::string folder = dir / "model";
  std::vector<at::Tensor> memory;
  SavedState state;
  std::vector<std::string> leftOut;
};

TEST_F(HuggingFace, RoundTrips) {
  at::Tensor a = at::arange(6, at::kFloat).view({3, 2}),
             b = at::arange(8, at::kFloat), c = at::ones({2});
  add("a", a);
  add("b", b);
  add("c", c);
  add("optimizer.state.a.exp_avg", a);
  state.values["train_state.step"] = 3;
  ASSERT_EQ(write(), "no error");
  EXPECT_THAT(leftOut, UnorderedElementsAre("optimizer.state.a.exp_avg",
                                            "train_state.step"));
  // 40 bytes a file: 24; 32 and 8.
  Tensors second = readTensors(folder + "/model-00002-of-00002.safetensors");
  EXPECT_EQ(second.size(), 2u);
  EXPECT_TRUE(second.at("b").equal(b));
  SavedState read = runtime::readHuggingFace(folder, nullptr);
  ASSERT_EQ(read.tensors.size(), 3u);
  EXPECT_NO_THROW(runtime::checkTiling(folder, "a", read.tensors.at("a")));
  std::vector<float> row(2);
  runtime::copyBox(read.tensors.at("a"), {{1, 0}, {1, 2}},
                   std::as_writable_bytes(std::span(row)));
  EXPECT_THAT(row, ElementsAre(2.0f, 3.0f));
  auto index =
      nlohmann::json::parse(readText(folder + "/model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], 64);
  EXPECT_EQ(index["weight_map"]["a"], "model-00001-of-00002.safetensors");
  EXPECT_THAT(write(), HasSubstr("expected a new or empty folder"));
}

TEST_F(HuggingFace, ReadsSingleFiles) {
  std::filesystem::create_directory(folder);
  writeTensors(folder + "/model.safetensors", {{"a", at::ones({2})}});
  for (const std::string &path : {folder, folder + "/model.safetensors"})
    EXPECT_EQ(runtime::readHuggingFace(path, nullptr).tensors.size(), 1u);
  EXPECT_FALSE(runtime::isHuggingFace(dir / ""));
}

TEST_F(HuggingFace, NamesMissingAndForeignFiles) {
  add("a", at::arange(6, at::kFloat).view({3, 2}));
  add("b", at::arange(8, at::kFloat));
  ASSERT_EQ(write(), "no error");
  std::string first = folder + "/model-00001-of-00002.safetensors",
              stale = folder + "/model-00003-of-00004.safetensors";
  std::filesystem::copy(first, stale);
  EXPECT_THAT(readError(), HasSubstr(stale + ": a file of another checkpoint"));
  std::filesystem::remove(stale);
  // A tensor more than the index says, and one less.
  writeTensors(first, {{"a", at::ones({3, 2})}, {"z", at::ones({1})}});
  EXPECT_THAT(readError(), AllOf(HasSubstr("tensor \"z\" of " + first),
                                 HasSubstr("is not in its \"weight_map\"")));
  writeTensors(first, {{"z", at::ones({1})}});
  EXPECT_THAT(readError(), HasSubstr("tensor \"a\" is not in " + first));
  std::filesystem::remove(first);
  EXPECT_THAT(readError(), HasSubstr(first + ": cannot open"));
}

TEST_F(HuggingFace, DetectsChangedData) {
  add("a", at::arange(6, at::kFloat).view({3, 2}));
  ASSERT_EQ(write(), "no error");
  std::string file = folder + "/model-00001-of-00001.safetensors";
  std::string text = readText(file);
  text.back() ^= 1;
  writeText(file, text);
  EXPECT_THAT(readError(), HasSubstr("expected data with hash"));
}

TEST_F(HuggingFace, TranslatesNames) {
  NameMap names = map(R"({
    "layers.{}.wq.weight": "model.layers.{}.self_attn.q_proj.weight",
    "layers.{}.experts.{}.w1": "model.layers.{}.mlp.{}.gate",
    "layers.0.wq.weight": "first",
    "tok": "model.embed_tokens.weight",
    "output": "model.embed_tokens.weight"})");
  EXPECT_EQ(names.theirs("layers.12.wq.weight"),
            "model.layers.12.self_attn.q_proj.weight");
  EXPECT_EQ(names.theirs("layers.3.experts.45.w1"),
            "model.layers.3.mlp.45.gate");
  EXPECT_EQ(names.theirs("layers.0.wq.weight"), "first");
  EXPECT_THAT(names.ours("model.layers.3.mlp.45.gate"),
              ElementsAre("layers.3.experts.45.w1"));
  EXPECT_THAT(names.ours("model.embed_tokens.weight"),
              UnorderedElementsAre("tok", "output"));
  for (const char *name :
       {"layers.x.wq.weight", "layers..wq.weight", "layers.1.wq.weight2", ""})
    EXPECT_THAT(errorOf([&] { names.theirs(name); }),
                HasSubstr("map.json: no name for tensor \"" +
                          std::string(name) + "\""));
}

TEST_F(HuggingFace, RefusesMapsThatAreNone) {
  for (auto [json, message] :
       {std::pair("[]", "expected a json object"), std::pair("{", "map.json"),
        std::pair(R"({"a": 1})", "expected a name for \"a\", got 1"),
        std::pair(R"({"a.{}": "b"})", "expected as many {} in \"b\""),
        std::pair(R"({"a": "b", "a": "c"})", "map.json")})
    EXPECT_THAT(errorOf([&] { map(json); }), HasSubstr(message));
  NameMap two = map(R"({"a.{}.c": "x.{}", "a.1.{}": "y.{}",
                        "a.{}.{}": "z.{}.{}", "a.{}.2": "w.{}"})");
  EXPECT_EQ(two.theirs("a.1.c"), "x.1");
  EXPECT_THAT(errorOf([&] { two.theirs("a.1.2"); }),
              HasSubstr("two names for tensor \"a.1.2\""));
  EXPECT_THAT(errorOf([&] { map("{}").theirs("a"); }), HasSubstr("no name"));
}

TEST_F(HuggingFace, TiesWhatTheMapTies) {
  NameMap names = map(R"({"tok": "embed", "output": "embed"})");
  add("tok", at::arange(6, at::kFloat).view({3, 2}));
  add("output", at::arange(6, at::kFloat).view({3, 2}));
  ASSERT_EQ(write(&names), "no error");
  SavedState read = runtime::readHuggingFace(folder, &names);
  EXPECT_EQ(read.tensors.size(), 2u);
  EXPECT_TRUE(read.tensors.contains("output"));
  add("output", at::ones({3, 2}));
  state.tensors["output"].chunks.erase(state.tensors["output"].chunks.begin(),
                                       state.tensors["output"].chunks.begin() +
                                           2);
  EXPECT_THAT(write(&names), HasSubstr("expected equal tensors for \"embed\""));
}

} // namespace
} // namespace fsdp::test
