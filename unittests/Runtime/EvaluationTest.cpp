//===- EvaluationTest.cpp - fsdp-run --eval-every -------------------------===//
#include "Support/Fixtures.h"
#include "Support/SamplePlan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <sstream>

namespace fsdp::test {
namespace {

using nlohmann::json;
using testing::HasSubstr;

class Evaluation : public testing::Test {
protected:
  void write(int64_t worldSize, int64_t samples, double lr = 0.1) {
    plan::Plan plan = samplePlan(worldSize);
    plan.optimizer.lr = lr;
    addEvaluation(plan);
    writeSample(dir, plan, samples);
  }

  std::vector<json> run(std::vector<std::string> args) {
    args.insert(args.begin(), dir / "plan.json");
    args.insert(args.end(), {"--metrics", dir / "m.jsonl"});
    result = runTool(args);
    EXPECT_EQ(result.status, 0) << result.err;
    std::istringstream lines(readText(dir / "m.jsonl"));
    std::vector<json> metrics;
    for (std::string line; std::getline(lines, line);)
      metrics.push_back(json::parse(line));
    return metrics;
  }

  ScratchDir dir;
  ToolResult result;
};

TEST_F(Evaluation, IsTheLossOfTheData) {
  for (int64_t worldSize : {1, 2, 3}) {
    write(worldSize, 3 * kBatch * worldSize, /*lr=*/0);
    std::string data = dir / "data.safetensors";
    std::vector<json> metrics =
        run({"--steps", "3", "--data", data, "--eval-every", "1", "--eval-data",
             data, "--eval-batches", "1"});
    ASSERT_EQ(metrics.size(), 3u);
    EXPECT_EQ(metrics[0]["rank_eval_losses"], metrics[0]["rank_losses"]);
    EXPECT_EQ(metrics[2]["rank_eval_losses"], metrics[0]["rank_losses"]);
    // By default all that the data fills.
    std::vector<json> all = run({"--steps", "3", "--data", data, "--eval-every",
                                 "3", "--eval-data", data});
    double mean = 0;
    for (const json &line : metrics)
      mean += line["loss"].get<double>() / 3;
    EXPECT_FALSE(all[1].contains("eval_loss"));
    EXPECT_NEAR(all[2]["eval_loss"].get<double>(), mean, 1e-6);
    EXPECT_THAT(result.err, HasSubstr("  eval_loss: "));
  }
}

TEST_F(Evaluation, LeavesTrainingAsItIs) {
  write(2, 22);
  std::string data = dir / "data.safetensors";
  std::vector<json> without = run({"--steps", "6", "--data", data});
  std::vector<json> with = run({"--steps", "6", "--data", data, "--eval-every",
                                "2", "--eval-data", data});
  ASSERT_EQ(with.size(), without.size());
  for (size_t i = 0; i < with.size(); ++i) {
    EXPECT_EQ(with[i]["rank_losses"], without[i]["rank_losses"]);
    EXPECT_EQ(with[i].contains("eval_loss"), i % 2 == 1);
  }
  EXPECT_LT(with[5]["eval_loss"], with[1]["eval_loss"]);
}

TEST_F(Evaluation, TakesSyntheticData) {
  write(2, 22);
  std::vector<json> metrics =
      run({"--steps", "2", "--eval-every", "1", "--eval-batches", "2"});
  EXPECT_NE(metrics[0]["rank_eval_losses"][0], metrics[0]["rank_losses"][0]);
}

TEST_F(Evaluation, RefusesWhatDoesNotFit) {
  auto expectRefused = [&](std::vector<std::string> args,
                           const std::string &message) {
    args.insert(args.begin(), dir / "plan.json");
    ToolResult refused = runTool(args);
    EXPECT_EQ(refused.status, 2);
    EXPECT_THAT(refused.err, HasSubstr(message));
    EXPECT_EQ(std::count(refused.err.begin(), refused.err.end(), '\n'), 1);
  };
  writeSample(dir, samplePlan(2));
  expectRefused({"--eval-every", "1"}, "the plan has no evaluation");
  write(2, 22);
  std::string data = dir / "data.safetensors";
  expectRefused({"--eval-every", "0"}, "--eval-every");
  expectRefused({"--eval-data", data}, "--eval-data requires --eval-every");
  expectRefused({"--data", data, "--eval-every", "1"},
                "expected --eval-data or --eval-split where --data is given");
  expectRefused({"--eval-every", "1", "--eval-data", dir / "none"}, "none");
}

TEST_F(Evaluation, NamesThePlaceOfAFailure) {
  plan::Plan plan = samplePlan(2);
  addEvaluation(plan);
  writeSample(dir, plan);
  for (size_t i = 0; i < plan.evaluation.size(); ++i)
    if (std::holds_alternative<plan::Call>(plan.evaluation[i].kind)) {
      std::string at = std::to_string(plan.instructions.size() + i);
      ToolResult thrown =
          runTool({dir / "plan.json", "--steps", "4", "--eval-every", "2",
                   "--inject-fault", "1:2:" + at + ":throw"});
      EXPECT_EQ(thrown.status, 1);
      EXPECT_THAT(thrown.err, HasSubstr("rank 1: step 2: evaluation: aten::"));
      ToolResult killed =
          runTool({dir / "plan.json", "--steps", "4", "--eval-every", "2",
                   "--inject-fault", "0:2:" + at + ":kill"});
      EXPECT_EQ(killed.status, 1);
      EXPECT_THAT(killed.err, HasSubstr("at step 2, evaluation, instruction " +
                                        std::to_string(i) + ": aten::"));
      return;
    }
  FAIL() << "no call in the evaluation";
}

} // namespace
} // namespace fsdp::test
