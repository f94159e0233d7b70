//===- TraceFileTest.cpp - a measured step on disk ------------------------===//
#include "fsdp/Plan/TraceFile.h"

#include "Support/SamplePlan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <map>

using namespace fsdp;
using namespace fsdp::plan;
using nlohmann::json;
using testing::HasSubstr;

namespace {

/// Each instruction takes 1.5 microseconds, one after the other.
MeasuredStep stepOf(const Plan &plan, int64_t ranks) {
  MeasuredStep step{"xxh3:00", plan.worldSize, 4, {}};
  for (int64_t rank = 0; rank < ranks; ++rank) {
    std::vector<Span> spans = stepSpans(plan);
    for (size_t i = 0; i < spans.size(); ++i) {
      spans[i].begin = double(i) * 1.5e-6;
      spans[i].end = double(i + 1) * 1.5e-6;
    }
    step.ranks.push_back({rank, 1e-3 * double(rank + 1), spans});
  }
  return step;
}

TEST(TraceFile, AStepRunsWhatItsMicrobatchesDo) {
  Plan plan = test::samplePlan(2);
  EXPECT_EQ(stepSpans(plan).size(), plan.instructions.size());

  test::accumulateWhole(plan);
  ASSERT_EQ(plan.accumulationSteps, 2);
  std::map<std::pair<int32_t, int32_t>, int> runs;
  for (const Span &span : stepSpans(plan))
    ++runs[{span.instruction, span.microbatch}];
  auto of = [&](size_t index) {
    return std::pair(runs[{int32_t(index), 0}], runs[{int32_t(index), 1}]);
  };
  EXPECT_EQ(of(test::find<Call>(plan)), std::pair(1, 1));
  EXPECT_EQ(of(test::find<ReduceScatter>(plan)), std::pair(0, 1));
  EXPECT_EQ(of(test::find<OptimizerStep>(plan)), std::pair(0, 1));
}

TEST(TraceFile, HasAnEventAnInstruction) {
  Plan plan = test::samplePlan(2);
  test::beginCollectives(plan);
  json trace = json::parse(printMeasuredStep(plan, stepOf(plan, 2)));
  std::map<std::string, std::string> names;
  std::vector<json> events;
  for (const json &event : trace["traceEvents"]) {
    if (event["ph"] == "M")
      names[std::to_string(event["pid"].get<int>()) + "/" +
            std::to_string(event["tid"].get<int>()) +
            event["name"].get<std::string>()] = event["args"]["name"];
    else if (event["pid"] == 1)
      events.push_back(event);
  }
  EXPECT_EQ(names["1/0process_name"], "rank 1");
  EXPECT_EQ(names["1/0thread_name"], "compute");
  EXPECT_EQ(names["1/1thread_name"], "all_gather");
  ASSERT_EQ(events.size(), plan.instructions.size());
  size_t gather = test::find<AllGather>(plan);
  const json &event = events[gather];
  const auto &kind = std::get<AllGather>(plan.instructions[gather].kind);
  EXPECT_EQ(event["name"], "all_gather " + plan.units[kind.unit].name);
  EXPECT_EQ(event["cat"], "forward");
  EXPECT_EQ(event["tid"], int(Stream::AllGather));
  EXPECT_NEAR(event["ts"].get<double>(), double(gather) * 1.5, 1e-9);
  EXPECT_EQ(event["dur"], 1.5);
  EXPECT_EQ(event["args"]["program"], "step");
  EXPECT_EQ(event["args"]["instruction"], gather);
  EXPECT_EQ(event["args"]["microbatch"], 0);
  EXPECT_EQ(event["args"]["unit"], plan.units[kind.unit].name);
}

TEST(TraceFile, WhatFollowsDoesNotOverlapByRounding) {
  Plan plan = test::samplePlan(2);
  MeasuredStep step = stepOf(plan, 1);
  double time = 0;
  for (Span &span : step.ranks[0].spans) {
    span.begin = time;
    span.end = time += 1.2345e-6 + 4e-10;
  }
  json trace = json::parse(printMeasuredStep(plan, step));
  int64_t before = 0; // nanoseconds
  for (const json &event : trace["traceEvents"]) {
    if (event["ph"] != "X")
      continue;
    EXPECT_EQ(std::llround(event["ts"].get<double>() * 1e3), before);
    before += std::llround(event["dur"].get<double>() * 1e3);
  }
}

TEST(TraceFile, ReadsWhatItPrints) {
  Plan plan = test::samplePlan(2);
  test::accumulateWhole(plan);
  MeasuredStep step = stepOf(plan, 2);
  MeasuredStep read = parseMeasuredStep(printMeasuredStep(plan, step),
                                        "trace.json", plan, "xxh3:00");
  EXPECT_EQ(read.step, 4);
  EXPECT_EQ(read.worldSize, 2);
  ASSERT_EQ(read.ranks.size(), 2u);
  EXPECT_EQ(read.ranks[1].rank, 1);
  EXPECT_NEAR(read.ranks[1].seconds, 2e-3, 1e-10);
  ASSERT_EQ(read.ranks[1].spans.size(), step.ranks[1].spans.size());
  for (size_t i = 0; i < step.ranks[1].spans.size(); ++i) {
    const Span &a = step.ranks[1].spans[i], &b = read.ranks[1].spans[i];
    EXPECT_EQ(a.instruction, b.instruction);
    EXPECT_EQ(a.microbatch, b.microbatch);
    EXPECT_NEAR(a.begin, b.begin, 1e-9);
    EXPECT_NEAR(a.end, b.end, 1e-9);
  }
}

TEST(TraceFile, RefusesWhatIsNoStepOfThePlan) {
  Plan plan = test::samplePlan(2);
  std::string good = printMeasuredStep(plan, stepOf(plan, 2));
  auto error = [&](const std::string &text) -> std::string {
    try {
      parseMeasuredStep(text, "trace.json", plan, "xxh3:00");
    } catch (const PlanError &error) {
      return error.what();
    }
    return "";
  };
  auto with = [&](const std::string &from, const std::string &to) {
    std::string text = good;
    return text.replace(text.find(from), from.size(), to);
  };
  EXPECT_EQ(error(good), "");
  EXPECT_THAT(error("[]"), HasSubstr("expected a trace that fsdp-run --trace"));
  EXPECT_THAT(error(TraceWriter(plan).finish()),
              HasSubstr("trace.json: expected a trace that fsdp-run --trace"));
  EXPECT_EQ(error(with("xxh3:00", "xxh3:01")),
            "trace.json: otherData.plan: expected a step of this plan, "
            "\"xxh3:00\", got one of \"xxh3:01\"");
  EXPECT_EQ(error(with("\"format\": 1", "\"format\": 2")),
            "trace.json: otherData.format: expected 1, got 2");
  EXPECT_THAT(error(with("\"rank\": 1", "\"rank\": 0")),
              HasSubstr("rank 0 is given twice"));
  EXPECT_THAT(error(with("\"rank\": 1", "\"rank\": 2")),
              HasSubstr("expected an integer in [0, 1], got 2"));
  EXPECT_THAT(error(with("\"dur\": 1.500", "\"dur\": -1.5")),
              HasSubstr("expected microseconds of at least 0"));
  EXPECT_THAT(
      error(with("\"dur\": 1.500", "\"dur\": 1e300")),
      HasSubstr("expected microseconds of at least 0 and at most 1e15"));
  EXPECT_THAT(error(with("\"pid\": 1, \"ts\"", "\"pid\": 7, \"ts\"")),
              HasSubstr("expected a rank of otherData.ranks, got 7"));
  EXPECT_THAT(
      error(with("\"instruction\": 3", "\"instruction\": 2")),
      HasSubstr("traceEvents: the events of rank 0: expected "
                "instruction 3 of microbatch 0 at 3, got instruction 2"));
  EXPECT_THAT(error(with("\"instruction\": 3", "\"instruction\": 9999")),
              HasSubstr("expected an integer in [0, "));
  MeasuredStep less = stepOf(plan, 1);
  less.ranks[0].spans.pop_back();
  EXPECT_THAT(error(printMeasuredStep(plan, less)),
              HasSubstr("one per instruction and microbatch, got "));
  EXPECT_THROW(readMeasuredStep("/does/not/exist.json", plan, ""), PlanError);
}

} // namespace
