//===- FsdpRunTest.cpp - bad input, failures and torchrun -----------------===//
#include "Support/Fixtures.h"
#include "Support/SamplePlan.h"
#include "fsdp/Runtime/SafeTensors.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

namespace fsdp::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class FsdpRun : public testing::Test {
protected:
  /// Bad input: status 2 and exactly one line.
  void expectRefused(const std::vector<std::string> &args,
                     const std::string &message) {
    ToolResult result = runTool(args);
    EXPECT_EQ(result.status, 2) << result.err;
    EXPECT_THAT(result.err, HasSubstr(message));
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1)
        << result.err;
    EXPECT_THAT(result.err, testing::StartsWith("fsdp-run: error: "));
  }

  ScratchDir dir;
};

TEST_F(FsdpRun, RefusesBadPlans) {
  writeSample(dir, samplePlan(2));
  std::string text = readText(dir / "plan.json");
  expectRefused({dir / "missing.json"}, "cannot open the plan");
  expectRefused({dir / "plan.json", "--nproc", "3"},
                "the plan is for world size 2, got --nproc 3");
  writeText(dir / "cut.json", text.substr(0, text.size() / 2));
  expectRefused({dir / "cut.json"}, "not valid json at byte");
  writeText(dir / "other.json", "{\"version\": 1}");
  expectRefused({dir / "other.json"}, "expected plan version 2, got 1");
  expectRefused({dir / "model.safetensors"}, "not valid json");
}

TEST_F(FsdpRun, RefusesBadOptions) {
  writeSample(dir, samplePlan(2));
  expectRefused({}, "plan is required");
  expectRefused({dir / "plan.json", "--step"}, "--step");
  expectRefused({dir / "plan.json", "--threads", "0"}, "--threads");
  expectRefused({dir / "plan.json", "--data", "x", "--synthetic"},
                "--data excludes --synthetic");
  expectRefused({dir / "plan.json", "--metrics", dir / "no/such/file"},
                "cannot write");
}

TEST_F(FsdpRun, RefusesUnknownOperators) {
  plan::Plan plan = samplePlan(2);
  auto &call =
      std::get<plan::Call>(plan.instructions[find<plan::Call>(plan)].kind);
  call.op = "aten::no_such_op";
  writeSample(dir, plan);
  expectRefused({dir / "plan.json"},
                "instruction 2: aten::no_such_op in module \"layer\" (unit "
                "\"layer\"): no operator \"aten::no_such_op\" in this "
                "LibTorch");
  plan.modules = {"other", "layer.inner"};
  writeSample(dir, plan);
  expectRefused({dir / "plan.json"},
                "in module \"layer.inner\" (unit \"layer\")");
  plan.modules = {"other", "layers"};
  writeSample(dir, plan);
  expectRefused({dir / "plan.json"}, "in module \"layers\" (unit \"(root)\")");
  call.recompute = true;
  writeSample(dir, plan);
  expectRefused({dir / "plan.json"},
                "aten::no_such_op, recomputed, in module \"layers\"");
  call.op = "aten::mm";
  call.args.push_back({plan::NoneArg{}});
  writeSample(dir, plan);
  expectRefused({dir / "plan.json"}, "expected 2 arguments, got 3");
  call.args.pop_back();
  call.args[1] = {1.5};
  writeSample(dir, plan);
  expectRefused({dir / "plan.json"},
                "argument \"mat2\": expected Tensor, got a float");
}

TEST_F(FsdpRun, RefusesBadWeights) {
  plan::Plan plan = samplePlan(2);
  writeSample(dir, plan);
  plan.weights.hash = runtime::SafeTensors(dir / "model.safetensors").hash();
  writeText(dir / "plan.json", plan::printPlan(plan));
  EXPECT_EQ(runTool({dir / "plan.json"}).status, 0);
  Tensors weights = sampleWeights();
  weights["w2"] = weights["w2"] + 1;
  writeTensors(dir / "model.safetensors", weights);
  expectRefused({dir / "plan.json"}, "expected weights with hash xxh3:");
  // Weights given by hand are not compared with the capture's.
  EXPECT_EQ(runTool({dir / "plan.json", "--weights", dir / "model.safetensors"})
                .status,
            0);
  weights.erase("w2");
  writeTensors(dir / "less.safetensors", weights);
  expectRefused({dir / "plan.json", "--weights", dir / "less.safetensors"},
                "no tensor for parameter \"w2\"");
  plan.weights = {};
  writeText(dir / "plan.json", plan::printPlan(plan));
  expectRefused({dir / "plan.json"}, "the plan names no weights");
}

TEST_F(FsdpRun, NamesTheOperatorOfTheInitialisationThatThrew) {
  plan::Plan plan = samplePlan(2);
  addInit(plan);
  auto &draw = std::get<plan::Call>(plan.init[1].kind);
  draw.args[2] = {-1.0}; // a standard deviation
  writeSample(dir, plan);
  ToolResult result = runTool({dir / "plan.json", "--steps", "1"});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err,
              HasSubstr("initialisation: aten::normal_ in module \"\""));
  std::get<plan::Call>(plan.init[0].kind).op = "aten::no_such_op";
  writeSample(dir, plan);
  expectRefused({dir / "plan.json"}, "no operator \"aten::no_such_op");
  std::get<plan::Call>(plan.init[0].kind).op = "aten::empty";
  draw = {"aten::sum", "", {draw.args[0], {plan::NoneArg{}}}, draw.outs};
  writeSample(dir, plan);
  result = runTool({dir / "plan.json", "--steps", "1"});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err,
              HasSubstr("initialisation: write_param \"layer.w1\": the value "
                        "does not have the declared shape and dtype"));
}

TEST_F(FsdpRun, RefusesBadData) {
  writeSample(dir, samplePlan(2));
  Tensors data = sampleData(4);
  data.erase("y");
  writeTensors(dir / "data.safetensors", data);
  expectRefused({dir / "plan.json", "--data", dir / "data.safetensors"},
                "no tensor for input \"y\"");
}

TEST_F(FsdpRun, NamesRankStepAndOperatorThatThrew) {
  plan::Plan plan = samplePlan(2);
  // A shape error that only the operator can see.
  auto &call =
      std::get<plan::Call>(plan.instructions[find<plan::Call>(plan)].kind);
  std::swap(call.args[0], call.args[1]);
  writeSample(dir, plan);
  ToolResult result = runTool({dir / "plan.json", "--steps", "3"});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err,
              testing::MatchesRegex("fsdp-run: error: rank [01]: step 1: "
                                    "aten::mm in module .layer. .unit "
                                    ".layer..: [^\n]*\n"));
}

TEST_F(FsdpRun, EndsWhenARankThrows) {
  writeSample(dir, samplePlan(3));
  plan::Plan plan = samplePlan(3);
  size_t at = find<plan::ReduceScatter>(plan);
  ToolResult result =
      runTool({dir / "plan.json", "--steps", "1000000", "--inject-fault",
               "1:3:" + std::to_string(at) + ":throw"});
  EXPECT_EQ(result.status, 1);
  EXPECT_LT(result.seconds, 120); // the run alone would take hours
  EXPECT_THAT(result.err,
              HasSubstr("fsdp-run: error: rank 1: step 3: reduce_scatter of "
                        "unit \"layer\": injected fault\n"));
}

TEST_F(FsdpRun, EndsWhenARankIsKilled) {
  writeSample(dir, samplePlan(3));
  plan::Plan plan = samplePlan(3);
  for (size_t at :
       {size_t(0), find<plan::Call>(plan), find<plan::ReduceScatter>(plan),
        find<plan::OptimizerStep>(plan)}) {
    ToolResult result =
        runTool({dir / "plan.json", "--steps", "1000000", "--inject-fault",
                 "2:4:" + std::to_string(at) + ":kill"});
    EXPECT_EQ(result.status, 1);
    EXPECT_LT(result.seconds, 120); // the run alone would take hours
    EXPECT_THAT(result.err,
                HasSubstr("fsdp-run: error: rank 2 was killed by signal 9 "
                          "(Killed) at step 4, instruction " +
                          std::to_string(at) + ": "));
    EXPECT_EQ(result.err.find("error:"), result.err.rfind("error:"))
        << result.err;
  }
}

//===----------------------------------------------------------------------===//
// Ranks started one by one, with torchrun's variables
//===----------------------------------------------------------------------===//

int freePort() {
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  bind(fd, reinterpret_cast<sockaddr *>(&address), size);
  getsockname(fd, reinterpret_cast<sockaddr *>(&address), &size);
  close(fd);
  return ntohs(address.sin_port);
}

std::vector<ToolResult> runAsTorchrun(const std::vector<std::string> &args,
                                      int ranks) {
  std::vector<ToolResult> results(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  std::string port = std::to_string(freePort());
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      results[size_t(rank)] =
          runTool(args, {{"RANK", std::to_string(rank)},
                         {"LOCAL_RANK", std::to_string(rank)},
                         {"WORLD_SIZE", std::to_string(ranks)},
                         {"MASTER_ADDR", "127.0.0.1"},
                         {"MASTER_PORT", port}});
    });
  for (std::thread &thread : threads)
    thread.join();
  return results;
}

TEST_F(FsdpRun, GivesTheSameWeightsUnderTorchrun) {
  writeSample(dir, samplePlan(3));
  ToolResult forked = runTool(
      {dir / "plan.json", "--steps", "5", "--save-weights", dir / "forked"});
  ASSERT_EQ(forked.status, 0) << forked.err;
  for (const ToolResult &result : runAsTorchrun(
           {dir / "plan.json", "--steps", "5", "--save-weights", dir / "own"},
           3))
    EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(readText(dir / "own"), readText(dir / "forked"));
}

TEST_F(FsdpRun, NamesTheDeadPeerUnderTorchrun) {
  writeSample(dir, samplePlan(2));
  auto results = runAsTorchrun(
      {dir / "plan.json", "--steps", "1000000", "--inject-fault", "1:3:0:kill"},
      2);
  EXPECT_EQ(results[1].status, -9);
  EXPECT_EQ(results[0].status, 1);
  EXPECT_THAT(results[0].err,
              AllOf(HasSubstr("fsdp-run: error: rank 0: rank 1 (pid "),
                    HasSubstr(") died; this rank was waiting in "),
                    HasSubstr(" at step 3")));
}

TEST_F(FsdpRun, RefusesBadTorchrunEnvironments) {
  writeSample(dir, samplePlan(2));
  auto error = [&](const std::map<std::string, std::string> &environment) {
    ToolResult result = runTool({dir / "plan.json"}, environment);
    EXPECT_EQ(result.status, 2);
    return result.err;
  };
  EXPECT_THAT(error({{"RANK", "0"}}), HasSubstr("WORLD_SIZE is not"));
  EXPECT_THAT(error({{"RANK", "x"}}),
              HasSubstr("RANK: expected a number, got \"x\""));
  EXPECT_THAT(error({{"RANK", "0"},
                     {"WORLD_SIZE", "4"},
                     {"MASTER_ADDR", "127.0.0.1"},
                     {"MASTER_PORT", "1"}}),
              HasSubstr("the plan is for world size 2, got WORLD_SIZE=4"));
}

} // namespace
} // namespace fsdp::test
