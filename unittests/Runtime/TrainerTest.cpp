//===- TrainerTest.cpp - whole runs against a serial reference ------------===//
#include "fsdp/Runtime/Launch/Trainer.h"
#include "Support/Fixtures.h"
#include "Support/SamplePlan.h"
#include "fsdp/Runtime/Error.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <sstream>

namespace fsdp::test {
namespace {

using testing::HasSubstr;

struct Reference {
  Tensors weights;
  std::vector<std::vector<double>> losses; ///< [step][rank]
};

/// The sample plan's mathematics in one process: every rank's gradients in
/// turn, averaged in Gloo's order, added over the microbatches, then SGD.
Reference trainSerially(int64_t worldSize, int64_t steps, int64_t samples,
                        int64_t microbatches = 1, bool transposedGrad = false) {
  Tensors weights = sampleWeights(), data = sampleData(samples);
  Reference reference;
  for (int64_t step = 0; step < steps; ++step) {
    Tensors total;
    reference.losses.emplace_back(size_t(worldSize));
    for (int64_t m = 0; m < microbatches; ++m) {
      std::vector<Tensors> found;
      for (int64_t rank = 0; rank < worldSize; ++rank) {
        at::Tensor rows =
            (at::arange(kBatch) +
             ((step * microbatches + m) * worldSize + rank) * kBatch)
                .remainder(samples);
        at::Tensor x = data["x"].index_select(0, rows);
        at::Tensor y = data["y"].index_select(0, rows);
        at::Tensor h = x.mm(weights["layer.w1"]);
        at::Tensor d = (h.mm(weights["w2"]) + weights["b"] + weights["shift"]) *
                           weights["scale"] -
                       y;
        reference.losses.back()[size_t(rank)] +=
            (d * d).mean().item<double>() / double(microbatches);
        at::Tensor g = d * (2.0 / (kBatch * kOutputs)) * weights["scale"];
        found.push_back({{"b", g.sum(0)},
                         {"w2", transposedGrad ? g.t().mm(h).t() : h.t().mm(g)},
                         {"layer.w1", x.t().mm(g.mm(weights["w2"].t()))}});
      }
      Tensors sum = sumAroundRing(found, {{"layer.w1"}, {"w2", "b"}});
      for (auto &[name, grad] : sum) {
        at::Tensor average = grad / double(worldSize);
        total[name] = m ? total[name] + average : average;
      }
    }
    for (auto &[name, grad] : total)
      weights[name] = weights[name].add(grad, -0.1);
  }
  reference.weights = weights;
  return reference;
}

class Trains : public testing::TestWithParam<int64_t> {};

TEST_P(Trains, LikeTheSerialReference) {
  int64_t worldSize = GetParam(), steps = 6, samples = 22;
  ScratchDir dir;
  writeSample(dir, samplePlan(worldSize), samples);
  ToolResult result = runTool(
      {dir / "plan.json", "--nproc", std::to_string(worldSize), "--steps",
       std::to_string(steps), "--data", dir / "data.safetensors", "--metrics",
       dir / "m.jsonl", "--save-weights", dir / "out.safetensors"});
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("step:  6  loss: "));

  Reference reference = trainSerially(worldSize, steps, samples);
  Tensors out = readTensors(dir / "out.safetensors");
  reference.weights["head.w2"] = reference.weights["w2"];
  ASSERT_EQ(out.size(), reference.weights.size());
  for (const auto &[name, want] : reference.weights)
    EXPECT_TRUE(out.at(name).equal(want)) << name;

  std::istringstream lines(readText(dir / "m.jsonl"));
  std::string line;
  int64_t step = 0;
  while (std::getline(lines, line)) {
    auto metrics = nlohmann::json::parse(line);
    const auto &want = reference.losses.at(size_t(step));
    EXPECT_EQ(metrics["step"], ++step);
    ASSERT_EQ(metrics["rank_losses"].size(), want.size());
    double mean = 0;
    for (size_t r = 0; r < want.size(); ++r) {
      mean += want[r] / double(worldSize);
      // Nine digits determine a float32.
      EXPECT_EQ(metrics["rank_losses"][r].get<float>(), float(want[r]));
    }
    EXPECT_NEAR(metrics["loss"].get<double>(), mean, 1e-7);
    EXPECT_GT(metrics["step_ms"].get<double>(), 0);
    EXPECT_GT(metrics["tokens_per_s"].get<double>(), 0);
    EXPECT_GT(metrics["peak_bytes"].get<int64_t>(), 0);
    EXPECT_GT(metrics["peak_rss_bytes"].get<int64_t>(), 0);
  }
  EXPECT_EQ(step, steps);
}

INSTANTIATE_TEST_SUITE_P(Ranks, Trains, testing::Values(1, 2, 3, 4, 6));

class Initialises : public testing::TestWithParam<int64_t> {};

TEST_P(Initialises, LikeOneDevice) {
  ScratchDir dir;
  plan::Plan plan = samplePlan(GetParam());
  addInit(plan);
  writeSample(dir, plan);
  auto run = [&](const std::vector<std::string> &words) {
    std::vector<std::string> args = {dir / "plan.json", "--steps", "0",
                                     "--save-weights", dir / "out"};
    args.insert(args.end(), words.begin(), words.end());
    ToolResult result = runTool(args);
    EXPECT_EQ(result.status, 0) << result.err;
    return readTensors(dir / "out");
  };
  for (uint64_t seed : {0, 9}) {
    at::manual_seed(seed);
    Tensors want;
    for (const plan::Param &param : plan.params) {
      want[param.name] = at::empty(param.spec.shape).normal_(0, 1);
      for (const std::string &alias : param.aliases)
        want[alias] = want[param.name];
    }
    want["shift"] = at::arange(1, 6).to(at::kFloat) * 2;
    std::string text = std::to_string(seed);
    for (const auto &words : std::vector<std::vector<std::string>>{
             {"--seed", text}, {"--seed", "4", "--init-seed", text}}) {
      Tensors got = run(words);
      ASSERT_EQ(got.size(), want.size());
      for (const auto &[name, tensor] : want)
        EXPECT_TRUE(got.at(name).equal(tensor)) << name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, Initialises, testing::Values(1, 2, 3, 6));

TEST(Trainer, PrefersWeightsToTheInitialisation) {
  ScratchDir dir;
  plan::Plan plan = samplePlan(2);
  addInit(plan);
  writeSample(dir, plan);
  ToolResult result =
      runTool({dir / "plan.json", "--steps", "0", "--weights",
               dir / "model.safetensors", "--save-weights", dir / "out"});
  ASSERT_EQ(result.status, 0) << result.err;
  Tensors got = readTensors(dir / "out");
  for (const auto &[name, want] : sampleWeights())
    EXPECT_TRUE(got.at(name).equal(want)) << name;
}

TEST(Trainer, AddsTheGradientsOfMicrobatches) {
  for (int64_t worldSize : {1, 3}) {
    plan::Plan plan = samplePlan(worldSize);
    plan.accumulationSteps = 2;
    size_t at = find<plan::OptimizerStep>(plan);
    auto &step = std::get<plan::OptimizerStep>(plan.instructions[at].kind);
    plan::Accumulate sums{step.params, step.grads, {}};
    for (plan::ValueId &grad : step.grads) {
      plan.values.push_back(plan.values[size_t(grad)]);
      grad = plan::ValueId(plan.values.size()) - 1;
      sums.outs.push_back(grad);
    }
    plan.instructions.insert(plan.instructions.begin() + long(at),
                             {sums, plan::Phase::Backward, -1, {}});
    ScratchDir dir;
    writeSample(dir, plan, 22);
    ToolResult result =
        runTool({dir / "plan.json", "--steps", "4", "--data",
                 dir / "data.safetensors", "--save-weights", dir / "out"});
    ASSERT_EQ(result.status, 0) << result.err;
    Reference reference = trainSerially(worldSize, 4, 22, 2);
    Tensors out = readTensors(dir / "out");
    for (const char *name : {"layer.w1", "w2", "b"})
      EXPECT_TRUE(out.at(name).equal(reference.weights.at(name))) << name;
  }
}

TEST(Trainer, OffloadedUnitsTrainAlike) {
  for (int64_t worldSize : {1, 3}) {
    plan::Plan plan = samplePlan(worldSize);
    offload(plan);
    ScratchDir dir;
    writeSample(dir, plan, 22);
    ToolResult result =
        runTool({dir / "plan.json", "--steps", "4", "--data",
                 dir / "data.safetensors", "--save-weights", dir / "out"});
    ASSERT_EQ(result.status, 0) << result.err;
    Reference reference = trainSerially(worldSize, 4, 22);
    Tensors out = readTensors(dir / "out");
    for (const char *name : {"layer.w1", "w2", "b"})
      EXPECT_TRUE(out.at(name).equal(reference.weights.at(name))) << name;
  }
}

TEST(Trainer, RepeatsBitForBit) {
  ScratchDir dir;
  writeSample(dir, samplePlan(3));
  auto run = [&](const std::string &seed) {
    ToolResult result = runTool({dir / "plan.json", "--steps", "20", "--seed",
                                 seed, "--save-weights", dir / "out"});
    EXPECT_EQ(result.status, 0) << result.err;
    return readText(dir / "out");
  };
  std::string first = run("5");
  EXPECT_EQ(run("5"), first);
  EXPECT_EQ(run("5"), first);
  EXPECT_NE(run("6"), first);
}

TEST(Trainer, TransposedViewOfAnInPlaceResultIsReduced) {
  ScratchDir dir;
  writeSample(dir, samplePlan(2, /*transposedGrad=*/true), 22);
  ToolResult result =
      runTool({dir / "plan.json", "--steps", "4", "--data",
               dir / "data.safetensors", "--save-weights", dir / "out"});
  ASSERT_EQ(result.status, 0) << result.err;
  Reference reference = trainSerially(2, 4, 22, 1, /*transposedGrad=*/true);
  Tensors out = readTensors(dir / "out");
  for (const char *name : {"layer.w1", "w2", "b"})
    EXPECT_TRUE(out.at(name).equal(reference.weights.at(name))) << name;
}

} // namespace
} // namespace fsdp::test
