//===- ReadPlanTest.cpp - JSON reading and printing -----------------------===//
#include "Support/SamplePlan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace fsdp::test {
namespace {

using namespace plan;
using testing::HasSubstr;

std::string errorOf(const std::string &text) {
  try {
    parsePlan(text, "p.json");
  } catch (const PlanError &error) {
    return error.what();
  }
  return "no error";
}

/// The text with the first occurrence of `from` replaced.
std::string with(std::string text, const std::string &from,
                 const std::string &to) {
  size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(ReadPlan, RoundTrips) {
  for (int64_t worldSize : {1, 2, 3}) {
    Plan plan = samplePlan(worldSize);
    std::string text = printPlan(plan);
    EXPECT_EQ(printPlan(parsePlan(text, "p.json")), text);
    addInit(plan);
    std::string withInit = printPlan(plan);
    EXPECT_NE(withInit, text);
    EXPECT_EQ(printPlan(parsePlan(withInit, "p.json")), withInit);
  }
}

TEST(ReadPlan, KeepsArgumentKinds) {
  Plan plan = samplePlan(1);
  auto &call = std::get<Call>(plan.instructions[find<Call>(plan)].kind);
  ArgList args = call.args;
  for (Arg arg : std::vector<Arg>{
           {NoneArg{}},
           {DeviceArg{}},
           {true},
           {int64_t(1)},
           {int64_t(std::numeric_limits<int64_t>::min())},
           {int64_t(std::numeric_limits<int64_t>::max())},
           {1.0},
           {1e300},
           {0.1},
           {-0.0},
           {std::numeric_limits<double>::denorm_min()},
           {std::numeric_limits<double>::infinity()},
           {-std::numeric_limits<double>::infinity()},
           {std::string("a\"b\n\xc3\xa9")},
           {ArgList{}},
           {ArgList{{ArgList{{int64_t(1)}, {2.0}}}, {NoneArg{}}}}}) {
    call.args = args;
    call.args.push_back(arg);
    Plan read = parsePlan(printPlan(plan), "p.json");
    EXPECT_EQ(
        std::get<Call>(read.instructions[find<Call>(read)].kind).args.back(),
        arg);
  }
  call.args.push_back({std::nan("")});
  Plan read = parsePlan(printPlan(plan), "p.json");
  const Arg &nan =
      std::get<Call>(read.instructions[find<Call>(read)].kind).args.back();
  EXPECT_TRUE(std::isnan(std::get<double>(nan.value)));
}

TEST(ReadPlan, RefusesEveryTruncation) {
  std::string text = printPlan(samplePlan(2));
  size_t end = text.rfind('}');
  for (size_t size = 0; size <= end; ++size)
    EXPECT_THAT(errorOf(text.substr(0, size)), HasSubstr("not valid json"))
        << "at " << size;
}

TEST(ReadPlan, NamesOtherVersion) {
  std::string text = printPlan(samplePlan(2));
  EXPECT_THAT(errorOf(with(text, "\"version\": 1", "\"version\": 7")),
              HasSubstr("version: expected plan version 1, got 7"));
  EXPECT_THAT(errorOf("{\"version\": 7, \"other\": []}"),
              HasSubstr("expected plan version 1, got 7"));
}

TEST(ReadPlan, NamesThePathOfADefect) {
  std::string text = printPlan(samplePlan(2));
  EXPECT_EQ(errorOf(with(text, "\"out\": ", "\"put\": ")),
            "p.json: instructions[4]: missing key \"out\"");
  EXPECT_EQ(errorOf(with(text, "\"momentum\"", "\"momentun\"")),
            "p.json: optimizer: missing key \"momentum\"");
  EXPECT_EQ(errorOf(with(text, "{\"path\"", "{\"x\": 1, \"path\"")),
            "p.json: weights: unknown key \"x\"");
  EXPECT_EQ(errorOf(with(text, "{\"t\": 0}", "{\"t\": 0.5}")),
            "p.json: instructions[2].args[0].t: expected an integer, got a "
            "float");
  EXPECT_EQ(errorOf(with(text, "\"float32\"", "\"float31\"")),
            "p.json: values[0].dtype: expected a dtype, got \"float31\"");
  EXPECT_EQ(errorOf(with(text, "\"shape\": [4, 3]", "\"shape\": [4, -3]")),
            "p.json: values[0].shape[1]: expected an integer in [0, "
            "9223372036854775807], got -3");
  EXPECT_EQ(errorOf(with(text, "[4, 3]", "[4000000000000, 3000000000000]")),
            "p.json: values[0].shape[1]: tensor too large");
  EXPECT_EQ(errorOf(with(text, "\"forward\"", "\"onward\"")),
            "p.json: instructions[0].phase: expected a phase, got \"onward\"");
  EXPECT_EQ(errorOf(with(text, "{\"all_gather\"", "{\"all_gether\"")),
            "p.json: instructions[0]: expected an instruction (call, "
            "read_buffer, constant, all_gather, reshard, reduce_scatter, "
            "optimizer_step, write_param or write_buffer)");
  EXPECT_EQ(errorOf("[]"), "p.json: expected an object, got array");
}

TEST(ReadPlan, TellsTheInitialisationFromTheStep) {
  Plan plan = samplePlan(2);
  addInit(plan);
  std::string text = printPlan(plan);
  EXPECT_EQ(errorOf(with(text, "{\"write_param\": 0, ",
                         "{\"write_param\": 0, \"phase\": \"forward\", ")),
            "p.json: init[2]: unknown key \"phase\"");
  EXPECT_EQ(errorOf(with(text, ", \"phase\": \"forward\"", "")),
            "p.json: instructions[0]: missing key \"phase\"");
  EXPECT_EQ(
      errorOf(with(text, "{\"write_buffer\": 0, ", "{\"write_buffer\": 0.5, ")),
      "p.json: init[14].write_buffer: expected an integer, got a float");
}

TEST(ReadPlan, RefusesDuplicateKeys) {
  std::string text = printPlan(samplePlan(2));
  EXPECT_EQ(errorOf(with(text, "{\"path\"", "{\"path\": \"\", \"path\"")),
            "p.json: duplicate key \"path\"");
}

TEST(ReadPlan, BoundsDepthAndIntegers) {
  EXPECT_EQ(errorOf(std::string(100000, '[')), "p.json: nested deeper than 64");
  EXPECT_EQ(errorOf("[18446744073709551615]"),
            "p.json: expected a 64-bit integer, got 18446744073709551615");
  EXPECT_EQ(errorOf("[99999999999999999999999]"),
            "p.json: expected a 64-bit integer, got 99999999999999999999999");
  std::string text = printPlan(samplePlan(2));
  EXPECT_THAT(errorOf(with(text, "\"loss\": ", "\"loss\": 99999999999")),
              HasSubstr("loss: expected an integer in [-1, 2147483647]"));
}

TEST(ReadPlan, RefusesMissingFile) {
  EXPECT_THROW(readPlan("/nonexistent/plan.json"), PlanError);
  EXPECT_THROW(readPlan("/"), PlanError);
}

TEST(ShardRows, EqualsTorchChunk) {
  // torch.chunk(torch.arange(rows), parts) and then empty chunks.
  struct Case {
    int64_t rows, parts;
    std::vector<std::pair<int64_t, int64_t>> want;
  };
  for (const Case &c :
       std::vector<Case>{{8, 2, {{0, 4}, {4, 8}}},
                         {7, 2, {{0, 4}, {4, 7}}},
                         {5, 4, {{0, 2}, {2, 4}, {4, 5}, {5, 5}}},
                         {3, 4, {{0, 1}, {1, 2}, {2, 3}, {3, 3}}},
                         {6, 4, {{0, 2}, {2, 4}, {4, 6}, {6, 6}}},
                         {1, 3, {{0, 1}, {1, 1}, {1, 1}}},
                         {0, 2, {{0, 0}, {0, 0}}},
                         {9, 1, {{0, 9}}}})
    for (int64_t r = 0; r < c.parts; ++r) {
      RowRange rows = shardRows(c.rows, c.parts, r);
      EXPECT_EQ(std::pair(rows.begin, rows.end), c.want[size_t(r)])
          << c.rows << " rows, part " << r << " of " << c.parts;
    }
}

} // namespace
} // namespace fsdp::test
