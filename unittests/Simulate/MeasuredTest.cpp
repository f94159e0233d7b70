//===- MeasuredTest.cpp - a measured step beside the planned one ----------===//
#include "fsdp/Simulate/Measured.h"

#include "Support/SamplePlan.h"
#include "fsdp/Simulate/Trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <numeric>

using namespace fsdp;
using namespace fsdp::plan;
using namespace fsdp::simulate;
using nlohmann::json;
using testing::ElementsAre;

namespace {

Instruction &add(Plan &plan, decltype(Instruction::kind) kind, Stream stream,
                 Phase phase = Phase::Forward) {
  plan.instructions.push_back({std::move(kind)});
  plan.instructions.back().stream = stream;
  plan.instructions.back().phase = phase;
  return plan.instructions.back();
}

TEST(Measured, EachMomentIsOfComputeOrOfTheFirstTransfer) {
  Plan plan;
  add(plan, AllGather{}, Stream::AllGather);
  add(plan, Constant{}, Stream::Compute);
  add(plan, ReduceScatter{}, Stream::ReduceScatter, Phase::Backward).records =
      0;
  add(plan, Constant{}, Stream::Compute, Phase::Backward);
  add(plan, Wait{}, Stream::Compute, Phase::Backward).waits = {0};
  add(plan, Constant{}, Stream::Compute, Phase::Optimizer);
  // 0-2 gather, 2-4 forward, 4-5 nothing, 5-7 backward, 7-8 gather and
  // reduction, 8-9 reduction, 9-10 a wait for it, 10-11 optimizer, to 13.
  std::vector<Span> spans = {{0, 0, 0, 2},  {1, 0, 2, 4},  {2, 0, 6, 9},
                             {3, 0, 5, 7},  {4, 0, 9, 10}, {5, 0, 10, 11},
                             {0, 1, 6.5, 8}};
  Breakdown parts = breakDown(plan, spans, 13);
  EXPECT_THAT(parts.compute, ElementsAre(2, 2, 1));
  EXPECT_EQ(parts.exposed[size_t(Stream::AllGather)], 3);
  EXPECT_EQ(parts.exposed[size_t(Stream::ReduceScatter)], 2);
  EXPECT_EQ(parts.exposed[size_t(Stream::Compute)], 0);
  EXPECT_EQ(parts.outside, 3);
}

TEST(Measured, APlannedStepIsAccountedForWhole) {
  Plan plan = test::samplePlan(2);
  test::beginCollectives(plan);
  DeviceModel device = loadDevice("cpu");
  device.serialStreams = false;
  StepCost cost = costOf(plan, device, nullptr, 0);
  cost.outsideSeconds = 1e-3;
  Timeline timeline = simulate::simulate(plan, cost, device);
  // The spans of a step are the runtime's.
  std::vector<Span> issued = stepSpans(plan);
  ASSERT_EQ(timeline.spans.size(), issued.size());
  for (size_t i = 0; i < issued.size(); ++i)
    EXPECT_EQ(timeline.spans[i].instruction, issued[i].instruction);
  Breakdown parts = breakDown(plan, timeline.spans, timeline.seconds);
  double compute =
      std::accumulate(parts.compute.begin(), parts.compute.end(), 0.0);
  EXPECT_NEAR(compute, timeline.busy[size_t(Stream::Compute)], 1e-12);
  double exposed =
      std::accumulate(parts.exposed.begin(), parts.exposed.end(), 0.0);
  EXPECT_NEAR(exposed, timeline.exposedCommunication(), 1e-12);
  EXPECT_NEAR(compute + exposed + parts.outside, timeline.seconds, 1e-12);
  EXPECT_NEAR(parts.outside, 1e-3, 1e-12);
}

TEST(Measured, DifferencesAreOfAllRunsOfAnOperator) {
  Plan plan = test::samplePlan(2);
  std::vector<Span> planned = stepSpans(plan), measured = planned;
  size_t call = test::find<Call>(plan);
  size_t optimizer = test::find<OptimizerStep>(plan);
  size_t gather = test::find<AllGather>(plan);
  measured[call].end = 3;
  planned[optimizer].end = 5;
  planned[gather].end = 100; // computes nothing
  std::vector<Difference> largest =
      largestDifferences(plan, planned, measured, 2);
  ASSERT_EQ(largest.size(), 2u);
  EXPECT_EQ(largest[0].what, signature(plan, plan.instructions[optimizer]));
  EXPECT_EQ(largest[0].planned, 5);
  EXPECT_EQ(largest[0].measured, 0);
  EXPECT_EQ(largest[1].what, signature(plan, plan.instructions[call]));
  EXPECT_EQ(largest[1].measured, 3);
}

TEST(Measured, IsAProcessBesideThePlanned) {
  Plan plan = test::samplePlan(2);
  Timeline timeline;
  timeline.spans = stepSpans(plan);
  timeline.spans[0].end = 1;
  MeasuredStep::Rank measured{1, 3, stepSpans(plan)};
  measured.spans[0].end = 2;
  json trace =
      json::parse(printTrace(plan, {{1, std::move(timeline), {}, &measured}}));
  std::map<std::string, double> ends;
  std::map<int64_t, std::string> names;
  for (const json &event : trace["traceEvents"])
    if (event["name"] == "process_name")
      names[event["pid"]] = event["args"]["name"];
    else if (event["ph"] == "X" && event["args"]["instruction"] == 0)
      ends[names[event["pid"]]] = event["dur"];
  EXPECT_THAT(ends, testing::UnorderedElementsAre(
                        testing::Pair("rank 1 planned", 1e6),
                        testing::Pair("rank 1 measured", 2e6)));
}

} // namespace
