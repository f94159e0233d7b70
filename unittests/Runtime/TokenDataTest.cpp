//===- TokenDataTest.cpp - files of tokens, and samples cut from them -----===//
#include "Support/Fixtures.h"
#include "Support/SamplePlan.h"
#include "Support/TokenFiles.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Files/OpenData.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>

namespace fsdp::test {
namespace {

using plan::DType;
using runtime::DataOptions;
using runtime::Documents;
using runtime::TokenFile;
using testing::HasSubstr;

constexpr int64_t kLength = 5;

/// Takes tokens and targets, int64 [2, 5].
plan::Plan tokenPlan(int64_t worldSize = 1) {
  plan::Plan plan = samplePlan(worldSize);
  for (plan::Input &input : plan.inputs) {
    input.spec = {{2, kLength}, DType::Int64};
    input.high = 60000;
  }
  return plan;
}

std::string messageOf(const std::function<void()> &body) {
  try {
    body();
  } catch (const std::exception &error) {
    return error.what();
  }
  return "no error";
}

std::vector<int64_t> valuesOf(const at::Tensor &tensor) {
  at::Tensor flat = tensor.to(at::kLong).flatten();
  return {flat.const_data_ptr<int64_t>(),
          flat.const_data_ptr<int64_t>() + flat.numel()};
}

/// Each sample's first token, of so many in a row.
std::vector<int64_t> beginsOf(const runtime::DataSource &data, int64_t count) {
  std::vector<int64_t> begins;
  for (int64_t first = 0; first < count; first += 2)
    for (const at::Tensor &row : data.inputs(first, 0).at(0).unbind())
      begins.push_back(row[0].item<int64_t>());
  begins.resize(size_t(count));
  return begins;
}

class TokenData : public testing::Test {
protected:
  void writeFlat(const std::string &name, size_t tokens, uint16_t first = 0) {
    writeText(dir / name, bytesOf(countUp<uint16_t>(tokens, first)));
  }
  void writePair(const std::string &name, const IndexParts &parts,
                 size_t tokens) {
    writeText(dir / (name + ".idx"), parts.text());
    writeFlat(name + ".bin", tokens);
  }
  std::unique_ptr<runtime::FileData> open(const DataOptions &options) {
    return runtime::openData(plan, options).training;
  }
  std::string errorOf(const DataOptions &options) {
    return messageOf([&] { open(options); });
  }
  std::string indexError(const IndexParts &parts, size_t tokens = 10) {
    writePair("m", parts, tokens);
    return messageOf([&] { TokenFile::openMegatron(dir / "m"); });
  }

  ScratchDir dir;
  plan::Plan plan = tokenPlan();
};

TEST_F(TokenData, GivesNextTokensToTheSecondInput) {
  writeFlat("t.bin", 26);
  auto data = open({.sources = {dir / "t.bin:uint16"}});
  EXPECT_EQ(data->epoch(), 5);
  auto inputs = data->inputs(2, 0);
  EXPECT_EQ(valuesOf(inputs.at(0)), countUp<int64_t>(10, 10));
  EXPECT_EQ(valuesOf(inputs.at(1)), countUp<int64_t>(10, 11));
  EXPECT_EQ(inputs.at(0).scalar_type(), at::kLong);
  // The last sample, then the first of the next epoch.
  EXPECT_EQ(beginsOf(*data, 6), (std::vector<int64_t>{0, 5, 10, 15, 20, 0}));
  EXPECT_EQ(data->describe(),
            dir / "t.bin (uint16, 26 tokens, 5 samples of 5: x+0, y+1), in "
                  "order");
  writeFlat("t.bin", 25); // one short of the last target
  EXPECT_EQ(open({.sources = {dir / "t.bin:uint16"}})->epoch(), 4);
}

TEST_F(TokenData, ShiftsInputsAsTold) {
  writeFlat("t.bin", 100);
  DataOptions options{.sources = {dir / "t.bin:uint16"}};
  options.tokenInputs = {"y", "x"};
  auto inputs = open(options)->inputs(0, 0);
  EXPECT_EQ(inputs.at(1)[0][0].item<int64_t>(), 0);
  EXPECT_EQ(inputs.at(0)[0][0].item<int64_t>(), 1);
  options.tokenInputs = {"x+3", "y+0"};
  inputs = open(options)->inputs(0, 0);
  EXPECT_EQ(inputs.at(0)[0][0].item<int64_t>(), 3);
  EXPECT_EQ(inputs.at(1)[0][0].item<int64_t>(), 0);
  for (const char *wrong : {"x+", "x+-1", "x+1.5", "x+99999999999999999999"}) {
    options.tokenInputs = {wrong, "y"};
    EXPECT_THAT(errorOf(options),
                HasSubstr("--token-inputs: expected NAME or NAME+SHIFT"));
  }
  options.tokenInputs = {"x", "z"};
  EXPECT_THAT(errorOf(options), HasSubstr("the plan has no input \"z\""));
  options.tokenInputs = {"x", "x"};
  EXPECT_THAT(errorOf(options), HasSubstr("\"x\" appears twice"));
  options.tokenInputs = {"x"};
  EXPECT_THAT(errorOf(options),
              HasSubstr("input \"y\": token data has nothing for it"));
  plan.inputs.pop_back();
  options.tokenInputs.clear();
  EXPECT_EQ(open(options)->inputs(0, 0).size(), 1u);
}

TEST_F(TokenData, RefusesPlansThatTakeNoTokens) {
  writeFlat("t.bin", 100);
  DataOptions options{.sources = {dir / "t.bin:uint16"}};
  plan = samplePlan(1);
  EXPECT_THAT(errorOf(options), HasSubstr("one or two integer inputs, but the "
                                          "plan has 0"));
  options.tokenInputs = {"x"};
  EXPECT_THAT(errorOf(options),
              HasSubstr("input \"x\": token data needs an integer input, got "
                        "float32[4, 3]"));
  plan = tokenPlan();
  plan.inputs[1].spec.shape = {2, 6};
  options.tokenInputs.clear();
  EXPECT_THAT(errorOf(options), HasSubstr("the shape of int64[2, 5]"));
  plan.inputs[1].spec.shape = {2};
  EXPECT_THAT(errorOf(options), HasSubstr("samples and a sequence"));
}

TEST_F(TokenData, ReadsEveryDType) {
  auto check = [&](const std::string &name, const std::string &bytes,
                   const std::vector<int64_t> &want) {
    writeText(dir / "t", bytes);
    auto file = TokenFile::openFlat(dir / "t", plan::parseDType(name));
    ASSERT_EQ(file->tokens(), int64_t(want.size())) << name;
    std::vector<int64_t> got(want.size());
    file->read(0, got);
    EXPECT_EQ(got, want) << name;
  };
  check("uint8", bytesOf<uint8_t>({0, 255}), {0, 255});
  check("int8", bytesOf<int8_t>({-1, 127}), {-1, 127});
  check("uint16", bytesOf<uint16_t>({0, 65535}), {0, 65535});
  check("int16", bytesOf<int16_t>({-2, 32767}), {-2, 32767});
  check("uint32", bytesOf<uint32_t>({0, 4294967295}), {0, 4294967295});
  check("int32", bytesOf<int32_t>({-3, 2147483647}), {-3, 2147483647});
  check("int64", bytesOf<int64_t>({-4, INT64_MAX}), {-4, INT64_MAX});
}

TEST_F(TokenData, WritesEveryDTypeOfInputs) {
  writeText(dir / "t", bytesOf(countUp<uint8_t>(40)));
  for (DType dtype : {DType::UInt8, DType::Int8, DType::Int16, DType::UInt16,
                      DType::Int32, DType::UInt32, DType::Int64}) {
    for (plan::Input &input : plan.inputs)
      input.spec.dtype = dtype;
    auto inputs = open({.sources = {dir / "t:uint8"}})->inputs(2, 0);
    EXPECT_EQ(valuesOf(inputs.at(0)), countUp<int64_t>(10, 10));
  }
}

TEST_F(TokenData, ReadsHeadersOfLlmC) {
  std::string tokens = bytesOf(countUp<uint16_t>(30));
  writeText(dir / "a", flatHeader(20240520, 1, 30) + tokens);
  writeText(dir / "b",
            flatHeader(20240801, 7, 30) + bytesOf(countUp<uint32_t>(30)));
  for (const std::string &source : {dir / "a", dir / "b", dir / "a:uint16"})
    EXPECT_EQ(valuesOf(open({.sources = {source}})->inputs(0, 0).at(1)),
              countUp<int64_t>(10, 1))
        << source;
  EXPECT_THAT(errorOf({.sources = {dir / "a:uint32"}}),
              HasSubstr("expected uint16, which its header says, got uint32"));
  writeText(dir / "a", flatHeader(20240520, 2, 30) + tokens);
  EXPECT_THAT(errorOf({.sources = {dir / "a"}}),
              HasSubstr("expected version 1 of a file with magic number "
                        "20240520, got 2"));
  for (int32_t count : {29, 31, -1, 0, INT32_MAX}) {
    writeText(dir / "a", flatHeader(20240520, 1, count) + tokens);
    EXPECT_THAT(errorOf({.sources = {dir / "a"}}),
                HasSubstr("expected " + std::to_string(count) +
                          " tokens, which its header says, got 30"));
  }
}

TEST_F(TokenData, RefusesEveryTruncationOfAHeader) {
  std::string text =
      flatHeader(20240520, 1, 20) + bytesOf(countUp<uint16_t>(20));
  for (size_t size = 0; size < text.size(); ++size) {
    writeText(dir / "a.bin", text.substr(0, size));
    EXPECT_NE(errorOf({.sources = {dir / "a.bin"}}), "no error") << size;
  }
  writeText(dir / "a.bin", text);
  EXPECT_EQ(errorOf({.sources = {dir / "a.bin"}}), "no error");
}

TEST_F(TokenData, RefusesFlatFilesOfOtherSizes) {
  writeText(dir / "t.bin", "abc");
  EXPECT_THAT(errorOf({.sources = {dir / "t.bin:uint16"}}),
              HasSubstr("expected tokens of 2 bytes, at least one, got 3"));
  writeText(dir / "t.bin", "");
  EXPECT_THAT(errorOf({.sources = {dir / "t.bin:uint16"}}),
              HasSubstr("at least one, got 0 bytes"));
  EXPECT_THAT(errorOf({.sources = {dir / "t.bin"}}),
              HasSubstr("expected llm.c's header, or the dtype of the tokens "
                        "after the path"));
  writeFlat("t.bin", 5);
  EXPECT_THAT(errorOf({.sources = {dir / "t.bin:uint16"}}),
              HasSubstr("expected at least 6 tokens, for a sample of 5, got "
                        "5"));
  EXPECT_THAT(errorOf({.sources = {dir / "none:uint16"}}),
              HasSubstr("none: cannot open: No such file"));
  EXPECT_THAT(errorOf({.sources = {(dir / "") + ":uint16"}}),
              HasSubstr("expected a regular file"));
}

TEST_F(TokenData, ReadsMegatronsPairs) {
  writePair("m", IndexParts::of({7, 0, 13, 6}), 26);
  auto file = TokenFile::openMegatron(dir / "m");
  EXPECT_EQ(file->tokens(), 26);
  EXPECT_EQ(file->documents(), 4);
  std::vector<int64_t> begins;
  file->eachDocument([&](int64_t begin) { begins.push_back(begin); });
  EXPECT_EQ(begins, (std::vector<int64_t>{0, 7, 7, 20, 26}));
  for (int64_t i = 0; i <= 4; ++i)
    EXPECT_EQ(file->documentBegin(i), begins[size_t(i)]);
  auto data = open({.sources = {dir / "m"}});
  EXPECT_EQ(beginsOf(*data, 5), (std::vector<int64_t>{0, 5, 10, 15, 20}));
}

TEST_F(TokenData, CutsSamplesWithinDocuments) {
  // Of 5 tokens and one more: 2 samples, none of 0, 5 and 5 tokens, 2, 1.
  writePair("m", IndexParts::of({11, 0, 5, 13, 5, 6}), 40);
  auto data = open({.sources = {dir / "m"}, .documents = Documents::Within});
  EXPECT_EQ(data->epoch(), 5);
  EXPECT_EQ(beginsOf(*data, 6), (std::vector<int64_t>{0, 5, 16, 21, 34, 0}));
  // Documents of several sequences.
  IndexParts parts = IndexParts::of({4, 7, 3, 8, 4});
  parts.documents = {0, 2, 2, 5};
  writePair("m", parts, 26);
  data = open({.sources = {dir / "m"}, .documents = Documents::Within});
  EXPECT_EQ(beginsOf(*data, 4), (std::vector<int64_t>{0, 5, 11, 16}));
  writeFlat("t.bin", 40);
  EXPECT_THAT(errorOf({.sources = {dir / "t.bin:uint16"},
                       .documents = Documents::Within}),
              HasSubstr("a flat file of tokens has no documents"));
  writePair("m", IndexParts::of({5, 5}), 10);
  EXPECT_THAT(errorOf({.sources = {dir / "m"}, .documents = Documents::Within}),
              HasSubstr("expected at least 6 tokens in a document"));
}

TEST_F(TokenData, RefusesBadIndices) {
  EXPECT_EQ(indexError(IndexParts::of({4, 6})), "no error");
  auto with = [&](const std::function<void(IndexParts &)> &change) {
    IndexParts parts = IndexParts::of({4, 6});
    change(parts);
    return indexError(parts);
  };
  EXPECT_THAT(with([](auto &p) { p.magic[0] = 'X'; }),
              HasSubstr("m.idx: not an index of Megatron-LM: expected it to "
                        "begin with \"MMIDIDX\""));
  EXPECT_THAT(with([](auto &p) { p.version = 2; }),
              HasSubstr("expected version 1, got 2"));
  for (uint8_t code : {0, 6, 7, 9, 255})
    EXPECT_THAT(with([&](auto &p) { p.dtype = code; }),
                HasSubstr("expected the code of an integer dtype, got " +
                          std::to_string(code)));
  EXPECT_THAT(with([](auto &p) { p.dtype = 4; }),
              HasSubstr("sequence 1: expected it at byte 16, where the "
                        "previous one ends, got 8"));
  EXPECT_THAT(with([](auto &p) { p.lengths[0] = -4; }),
              HasSubstr("sequence 0: expected a length, got -4"));
  EXPECT_THAT(with([](auto &p) { p.lengths[1] = INT32_MAX; }),
              HasSubstr("expected it within the 20 bytes of "));
  for (int64_t pointer : {int64_t(-8), int64_t(6), INT64_MAX, INT64_MIN})
    EXPECT_THAT(with([&](auto &p) { p.pointers[1] = pointer; }),
                HasSubstr("expected it at byte 8, where"));
  EXPECT_THAT(with([](auto &p) { p.documents[0] = 1; }),
              HasSubstr("document index 0: expected 0, got 1"));
  EXPECT_THAT(with([](auto &p) { p.documents[2] = 1; }),
              HasSubstr("document index 2: expected 2, got 1"));
  EXPECT_THAT(with([](auto &p) { p.documents = {0, 2, 1, 2}; }),
              HasSubstr("document index 2: expected 2, got 1"));
  EXPECT_THAT(with([](auto &p) { p.documents[1] = -1; }),
              HasSubstr("document index 1: expected one from 0 to 2, got -1"));
  EXPECT_THAT(with([](auto &p) { p.documents[1] = INT64_MAX; }),
              HasSubstr("expected one from 0 to 2"));
  EXPECT_THAT(with([](auto &p) { p.documents = {0}; }),
              HasSubstr("at least one sequence and one document, got 2 and 0"));
  EXPECT_THAT(indexError(IndexParts::of({4, 6}), 11),
              HasSubstr("m.bin: expected 20 bytes, which its index says, got "
                        "22"));
  EXPECT_THAT(indexError(IndexParts::of({4, 6}), 9),
              HasSubstr("expected it within the 18 bytes of "));
  EXPECT_THAT(indexError(IndexParts::of({0}), 0),
              HasSubstr("expected at least one token, got none"));
}

TEST_F(TokenData, RefusesIndicesOfOtherSizes) {
  std::string text = IndexParts::of({4, 6}).text();
  writeFlat("m.bin", 10);
  auto errorOfIndex = [&](const std::string &index) {
    writeText(dir / "m.idx", index);
    return messageOf([&] { TokenFile::openMegatron(dir / "m"); });
  };
  EXPECT_EQ(errorOfIndex(text), "no error");
  for (size_t size = 0; size < text.size(); ++size)
    EXPECT_NE(errorOfIndex(text.substr(0, size)), "no error") << size;
  EXPECT_THAT(errorOfIndex(text + std::string(2, '\0')),
              HasSubstr("sequences with modes (images) are not supported"));
  EXPECT_THAT(errorOfIndex(text + std::string(1, '\0')),
              HasSubstr("2 sequences and 3 document indices do not fill"));
  // Counts whose bytes overflow.
  for (size_t field : {18, 26})
    for (uint64_t count :
         {UINT64_MAX, UINT64_MAX / 12 + 1, uint64_t(1) << 61, uint64_t(0)}) {
      std::string other = text;
      other.replace(field, 8, bytesOf(std::vector{count}));
      EXPECT_THAT(errorOfIndex(other), HasSubstr(" do not fill the file's "))
          << field << " " << count;
    }
}

TEST_F(TokenData, HoldsOutTheLastPart) {
  writeFlat("t.bin", 100);
  runtime::TrainingData data = runtime::openData(
      plan, {.sources = {dir / "t.bin:uint16"}, .evalSplit = "0.25"});
  EXPECT_EQ(data.training->epoch(), 14); // (75 - 6) / 5 + 1
  EXPECT_EQ(data.heldOut->epoch(), 4);
  EXPECT_EQ(beginsOf(*data.heldOut, 4), (std::vector<int64_t>{75, 80, 85, 90}));
  // No training sample, nor its targets, has a token that is held out.
  auto last = data.training->inputs(12, 0);
  EXPECT_EQ(last.at(1).max().item<int64_t>(), 70);
  // Whole documents.
  writePair("m", IndexParts::of({30, 30, 30, 10}), 100);
  for (Documents documents : {Documents::Cross, Documents::Within}) {
    data = runtime::openData(
        plan,
        {.sources = {dir / "m"}, .evalSplit = "0.5", .documents = documents});
    EXPECT_EQ(beginsOf(*data.heldOut, 1), (std::vector<int64_t>{60}));
    EXPECT_EQ(data.heldOut->epoch(), documents == Documents::Cross ? 7 : 6);
    EXPECT_EQ(data.training->epoch(), documents == Documents::Cross ? 11 : 10);
  }
  for (const char *wrong : {"0", "1", "1.5", "-0.1", "x", "0.0000001", "."})
    EXPECT_THAT(errorOf({.sources = {dir / "m"}, .evalSplit = wrong}),
                HasSubstr("--eval-split: expected a fraction between 0 and "
                          "1"))
        << wrong;
  EXPECT_THAT(errorOf({.sources = {dir / "t.bin:uint16"}, .evalSplit = "0.01"}),
              HasSubstr("--eval-split: "));
}

TEST_F(TokenData, HasOneOrderOnAnyNumberOfRanks) {
  writeFlat("a.bin", 301);
  writeFlat("b.bin", 101, 1000);
  DataOptions options{.sources = {"0.75:" + (dir / "a.bin:uint16"),
                                  "0.25:" + (dir / "b.bin:uint16")},
                      .shuffleSeed = 11};
  std::vector<int64_t> want = beginsOf(*open(options), 240);
  EXPECT_EQ(std::set(want.begin(), want.begin() + 80).size(), 80u);
  for (int64_t worldSize : {2, 3, 4, 5}) {
    plan::Plan other = tokenPlan(worldSize);
    auto data = runtime::openData(other, options).training;
    std::vector<int64_t> got;
    for (int64_t first = 0; first < 240; first += worldSize * 2)
      for (int64_t rank = 0; rank < worldSize; ++rank)
        for (const at::Tensor &row : data->inputs(first, rank).at(0).unbind())
          got.push_back(row[0].item<int64_t>());
    EXPECT_EQ(got, want) << worldSize;
  }
}

TEST_F(TokenData, RefusesIdsOutOfRange) {
  std::vector<uint16_t> tokens = countUp<uint16_t>(100);
  tokens[37] = 60000;
  writeText(dir / "t.bin", bytesOf(tokens));
  auto data = open({.sources = {dir / "t.bin:uint16"}});
  EXPECT_NO_THROW(data->inputs(4, 0));
  EXPECT_THAT(messageOf([&] { data->inputs(6, 0); }),
              HasSubstr("t.bin: token 37 is 60000: expected an id in [0, "
                        "60000), the range of input \"x\" in the batch that "
                        "was captured"));
  plan.inputs[0].low = 3;
  EXPECT_THAT(messageOf([&] {
                open({.sources = {dir / "t.bin:uint16"}})->inputs(0, 0);
              }),
              HasSubstr("token 0 is 0: expected an id in [3, 60000)"));
  // What the input's dtype has.
  plan.inputs[0].low = 0;
  plan.inputs[1].spec.dtype = DType::UInt8;
  tokens = countUp<uint16_t>(100, 200);
  writeText(dir / "t.bin", bytesOf(tokens));
  data = open({.sources = {dir / "t.bin:uint16"}});
  EXPECT_THAT(messageOf([&] { data->inputs(10, 0); }),
              HasSubstr("token 56 is 256: expected an id in [0, 256)"));
}

TEST_F(TokenData, TakesTheRangeOfTheEmbedding) {
  writeFlat("t.bin", 600);
  auto &call =
      std::get<plan::Call>(plan.instructions[find<plan::Call>(plan)].kind);
  auto weight = std::get<plan::TensorArg>(call.args.at(0).value).value;
  call.op = "aten::embedding";
  plan.inputs[0].high = 3; // of the batch that was captured
  call.args[1] = {plan::TensorArg{plan.inputs[1].value}};
  EXPECT_THAT(errorOf({.sources = {dir / "t.bin:uint16"}}),
              HasSubstr("input \"y\" goes into an embedding, but is not the "
                        "first integer input of the plan: say which inputs get "
                        "tokens and next tokens, as --token-inputs y,x"));
  call.args[1] = {plan::TensorArg{plan.inputs[0].value}};
  plan.values[size_t(weight)].shape = {500, 4};
  auto data = open({.sources = {dir / "t.bin:uint16"}});
  EXPECT_NO_THROW(data->inputs(96, 0));
  EXPECT_THAT(messageOf([&] { data->inputs(100, 0); }),
              HasSubstr("token 500 is 500: expected an id in [0, 500), the "
                        "rows of the embedding of input \"x\""));
}

TEST_F(TokenData, NoticesChangesUnderTheRun) {
  writePair("m", IndexParts::of({50, 50}), 100);
  auto data = open({.sources = {dir / "m"}});
  EXPECT_NO_THROW(data->inputs(0, 0));
  std::filesystem::resize_file(dir / "m.bin", 100);
  EXPECT_THAT(messageOf([&] { data->inputs(0, 0); }),
              HasSubstr("m.bin: changed while the run reads it: expected 200 "
                        "bytes, got 100"));
  EXPECT_THAT(messageOf([&] { data->inputs(16, 0); }),
              HasSubstr("m.bin: changed while the run reads it"));
}

TEST(DataSpec, TakesWeightsAndDTypes) {
  auto spec = [](const std::string &text) {
    return runtime::parseDataSpec(text, "--data");
  };
  EXPECT_EQ(spec("a/b.bin").path, "a/b.bin");
  EXPECT_EQ(spec("0.7").path, "0.7");
  EXPECT_EQ(spec("t:uint16").dtype, DType::UInt16);
  EXPECT_EQ(spec("0.7:t").weight, 700'000);
  EXPECT_EQ(spec("3:t").weight, 3'000'000);
  EXPECT_EQ(spec(".5:t").weight, 500'000);
  auto all = spec("12.000001:a b:int32");
  EXPECT_EQ(all.path, "a b");
  EXPECT_EQ(all.weight, 12'000'001);
  EXPECT_EQ(all.dtype, DType::Int32);
  auto errorOf = [&](const std::string &text) {
    return messageOf([&] { spec(text); });
  };
  for (const char *text : {"a:b", "a:b:uint16", "1:a:b", "1:2:3:4", "a:uint17",
                           "uint16:a", "-1:a", "1e3:a", ":", "a:"})
    EXPECT_THAT(errorOf(text), HasSubstr("--data: expected [WEIGHT:]PATH"))
        << text;
  for (const char *text : {"0:a", "0.0:a", "1.2.3:a", "1.0000001:a",
                           "1234567:a", ".:a", "99999999999999999999:a"})
    EXPECT_THAT(errorOf(text), HasSubstr("expected a weight above 0")) << text;
  for (const char *text : {"", "1:", ":uint16", "1::uint16"})
    EXPECT_THAT(errorOf(text), HasSubstr("expected a path")) << text;
  for (const char *text : {"a:float32", "a:bool", "a:uint64"})
    EXPECT_THAT(errorOf(text), HasSubstr("expected a dtype of tokens")) << text;
  EXPECT_THAT(errorOf("0.5:uint16"), HasSubstr("a weight or a path?"));
}

TEST_F(TokenData, RefusesSourcesThatMayMeanTwoThings) {
  writePair("m", IndexParts::of({4, 6}), 10);
  EXPECT_THAT(errorOf({.sources = {dir / "m.bin"}}),
              HasSubstr("there is an index beside it: expected the prefix "));
  EXPECT_EQ(errorOf({.sources = {dir / "m.bin:uint16"}}), "no error");
  writeFlat("m", 20);
  EXPECT_THAT(errorOf({.sources = {dir / "m"}}),
              HasSubstr("m.idx too: expected one of them"));
  writeTensors(dir / "s", {{"x", at::zeros({4, 5}, at::kLong)},
                           {"y", at::zeros({4, 5}, at::kLong)}});
  std::string tokens = dir / "m.bin:uint16";
  EXPECT_THAT(errorOf({.sources = {tokens, dir / "s"}}),
              HasSubstr("expected sources of one kind"));
  EXPECT_THAT(errorOf({.sources = {"1:" + tokens, tokens}}),
              HasSubstr("expected a weight for every source or for none, got 1 "
                        "for 2"));
  EXPECT_THAT(errorOf({.sources = {"1:" + tokens}}),
              HasSubstr("a weight is only for one of several sources"));
  EXPECT_THAT(errorOf({.sources = {dir / "s"}, .tokenInputs = {"x"}}),
              HasSubstr("--token-inputs: expected files of tokens"));
  EXPECT_THAT(errorOf({.sources = {dir / "s"}, .documents = Documents::Within}),
              HasSubstr("--documents within: expected files of tokens"));
  EXPECT_THAT(messageOf([&] {
                runtime::openEvalData(plan, {"1:" + tokens, "2:" + tokens}, {});
              }),
              HasSubstr("--eval-data: expected no weights"));
}

} // namespace
} // namespace fsdp::test
