//===- ReporterTest.cpp - what a run tells of itself ----------------------===//
#include "fsdp/Runtime/Launch/Reporter.h"
#include "Support/Fixtures.h"
#include "Support/SamplePlan.h"
#include "fsdp/Runtime/Devices/Device.h"
#include "fsdp/Runtime/Error.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <fstream>
#include <map>

namespace fsdp::runtime {
namespace {

/// Steps of one second; those after a save, ten of them, take `slow`. Returns
/// what is told, by the number of steps done.
std::map<size_t, double> slowdowns(const std::vector<size_t> &saves,
                                   size_t late = 0) {
  SaveSlowdown slowdown;
  std::map<size_t, double> told;
  for (size_t done = 1; done <= 100; ++done) {
    for (size_t save : saves)
      if (save + 1 + late == done)
        slowdown.saved(save);
    bool isSlow = std::any_of(saves.begin(), saves.end(), [&](size_t save) {
      return done > save && done <= save + SaveSlowdown::kSteps;
    });
    slowdown.step(isSlow ? 1.5 : 1);
    if (auto ratio = slowdown.take())
      told[done] = *ratio;
  }
  return told;
}

using Told = std::map<size_t, double>;

TEST(SaveSlowdown, ComparesTenStepsAfterASaveToTenBefore) {
  EXPECT_EQ(slowdowns({20, 40}), (Told{{30, 1.5}, {50, 1.5}}));
  // A save that goes on beside many steps.
  EXPECT_EQ(slowdowns({20}, 14), (Told{{35, 1.5}}));
}

TEST(SaveSlowdown, SaysNothingWhereStepsAreNotComparable) {
  // The first step of a process, other saves, and the end.
  EXPECT_EQ(slowdowns({10}), Told{});
  EXPECT_EQ(slowdowns({95}), Told{});
  EXPECT_EQ(slowdowns({20, 39}), (Told{{30, 1.5}}));
  EXPECT_EQ(slowdowns({20, 25}), Told{});
}

TEST(Reporter, WritesWhatIsCaptured) {
  test::ScratchDir dir;
  plan::Plan plan = test::samplePlan(1);
  plan.optimizer.fused = true;
  std::unique_ptr<Device> device = makeCpuDevice();
  RankArena arena(plan, 0, *device);
  ReportSettings settings;
  settings.metricsPath = dir / "metrics.jsonl";
  settings.steps = 2;
  {
    Reporter reporter(plan, settings);
    StepResult result;
    std::optional<StepGraphs> graphs;
    reporter.report(0, 1, result, {RankStats{}}, arena, graphs, false, {});
    graphs.emplace(plan, *device).abandon("no \"pool\"");
    reporter.report(1, 1, result, {RankStats{}}, arena, graphs, false, {});
  }
  std::ifstream file(settings.metricsPath);
  std::string line;
  std::getline(file, line);
  EXPECT_FALSE(nlohmann::json::parse(line).contains("cuda_graphs"));
  std::getline(file, line);
  EXPECT_EQ(nlohmann::json::parse(line)["cuda_graphs"],
            "whole step not captured: no \"pool\"");
}

/// What a resume after step 2 keeps of a metrics file.
std::string keptOf(const std::string &text) {
  test::ScratchDir dir;
  test::writeText(dir / "metrics.jsonl", text);
  return text.substr(0, bytesOfSteps(dir / "metrics.jsonl", 2));
}

TEST(Reporter, KeepsTheLinesOfTheStepsBefore) {
  std::string one = "{\"step\": 1, \"loss\": 5}\n";
  std::string two = "{\"step\": 2, \"loss\": 4}\n";
  std::string three = "{\"step\": 3, \"loss\": 3}\n";
  EXPECT_EQ(keptOf(one + two + three), one + two);
  EXPECT_EQ(keptOf(three), "");
  EXPECT_EQ(keptOf(""), "");
  // Cut.
  EXPECT_EQ(keptOf(one + two.substr(0, 9)), one);
  EXPECT_EQ(keptOf(one.substr(0, 5)), "");
  // Damaged.
  for (std::string bad : {std::string("{\"step\": 1, \"lo\n"),
                          std::string(20, '\0') + "\n", std::string("\n")}) {
    EXPECT_EQ(keptOf(bad + two + three), bad + two);
    EXPECT_EQ(keptOf(one + bad + two + bad + three), one + bad + two);
  }
}

TEST(Reporter, DoesNotCutOtherFiles) {
  for (const char *text : {"weights", "weights\n", "{}\n", "[1]\n{}\n", "\n"})
    EXPECT_THROW(keptOf(text), InputError) << text;
  EXPECT_EQ(bytesOfSteps("/dev/null", 2), 0u);
}

} // namespace
} // namespace fsdp::runtime
