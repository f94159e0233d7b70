//===- FsdpRunTest.cpp - bad input, failures and torchrun -----------------===//
#include "Support/Fixtures.h"
#include "Support/SamplePlan.h"
#include "fsdp/Runtime/Files/SafeTensors.h"
#include "fsdp/Runtime/Operators/CallTable.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
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
  expectRefused({dir / "missing.json"},
                "missing.json: cannot be read: No such file or directory");
  expectRefused({dir / "plan.json", "--nproc", "3"},
                "the plan is for world size 2, got --nproc 3");
  writeText(dir / "cut.json", text.substr(0, text.size() / 2));
  expectRefused({dir / "cut.json"}, "not valid json at byte");
  writeText(dir / "other.json", "{\"version\": 1}");
  expectRefused({dir / "other.json"}, "expected plan version 3, got 1");
  expectRefused({dir / "model.safetensors"}, "not valid json");
}

TEST_F(FsdpRun, RefusesBadOptions) {
  writeSample(dir, samplePlan(2));
  expectRefused({}, "plan is required");
  expectRefused({dir / "plan.json", "--step"}, "--step");
  expectRefused({dir / "plan.json", "--threads", "0"}, "--threads");
  for (const char *number : {"-1", "+1", "1.5", "99999999999999999999", "0x10"})
    expectRefused({dir / "plan.json", "--steps", number},
                  "--steps: expected a whole number from 0 to ");
  for (const char *option : {"--seed", "--init-seed", "--eval-every"})
    expectRefused({dir / "plan.json", option, "-1"},
                  std::string(option) + ": expected a whole number from ");
  expectRefused({dir / "plan.json", "--threads", "100000"}, "--threads");
  expectRefused({dir / "plan.json", "--nproc", "0"}, "--nproc");
  expectRefused({dir / "plan.json", "--data", "x", "--synthetic"},
                "--data excludes --synthetic");
  expectRefused({dir / "plan.json", "--metrics", dir / "no/such/file"},
                "cannot write");
}

TEST_F(FsdpRun, RefusesMoreRanksThanTheMachineHolds) {
  writeSample(dir, samplePlan(1 << 19));
  expectRefused({dir / "plan.json"},
                "plan.json: cannot start 524288 ranks on this machine: "
                "expected at most 64 for each of its ");
}

TEST_F(FsdpRun, OpensWhatItWritesBeforeTheFirstStep) {
  writeSample(dir, samplePlan(2));
  for (const char *option :
       {"--save-weights", "--metrics", "--profile", "--trace"})
    expectRefused({dir / "plan.json", "--steps", "5", option, dir / "none/f"},
                  "none/f: cannot write: No such file or directory");
  expectRefused({dir / "plan.json", "--save-weights", "/dev/null"},
                "/dev/null: cannot write: expected a regular file");
  // Nothing is left of a run that fails, nor in the place of what was there.
  writeText(dir / "weights", "old");
  for (const char *fault : {"1:2:3:throw", "0:2:3:kill"}) {
    ToolResult result = runTool({dir / "plan.json", "--steps", "5",
                                 "--save-weights", dir / "weights", "--trace",
                                 dir / "trace", "--inject-fault", fault});
    EXPECT_EQ(result.status, 1) << result.err;
    EXPECT_EQ(readText(dir / "weights"), "old");
    size_t files = 0;
    for (const auto &entry : std::filesystem::directory_iterator(dir / ""))
      files += entry.path().filename().string().starts_with("weights") ||
               entry.path().filename().string().starts_with("trace");
    EXPECT_EQ(files, 1u);
  }
}

TEST_F(FsdpRun, WarnsOfNumbersThatAreNone) {
  writeSample(dir, samplePlan(2));
  Tensors data = sampleData(32);
  ToolResult result =
      runTool({dir / "plan.json", "--steps", "2", "--data",
               dir / "data.safetensors", "--save-weights", dir / "w"});
  EXPECT_EQ(result.status, 0);
  EXPECT_THAT(result.err, Not(HasSubstr("warning")));
  for (auto &[name, tensor] : data)
    if (tensor.is_floating_point())
      tensor.fill_(std::numeric_limits<float>::quiet_NaN());
  writeTensors(dir / "data.safetensors", data);
  result = runTool({dir / "plan.json", "--steps", "3", "--data",
                    dir / "data.safetensors", "--save-weights", dir / "w"});
  EXPECT_EQ(result.status, 0);
  EXPECT_THAT(result.err, HasSubstr("fsdp-run: warning: step 1: rank 0: the "
                                    "loss is "));
  EXPECT_THAT(result.err, HasSubstr("w: not finite: \""));
  size_t warnings = 0;
  for (size_t at = 0;
       (at = result.err.find("warning", at)) != std::string::npos; ++at)
    ++warnings;
  EXPECT_EQ(warnings, 2u) << result.err;
}

TEST_F(FsdpRun, KnowsFilesThatChanged) {
  writeSample(dir, samplePlan(2));
  std::string path = dir / "data.safetensors";
  std::string hash = runtime::SafeTensors(path).hash();
  std::vector<std::string> args = {dir / "plan.json", "--data", path,
                                   "--data-hash", hash};
  EXPECT_EQ(runTool(args).status, 0);
  args.back()[10] ^= 1;
  expectRefused(args, "expected a file with hash xxh3:");
  for (const char *option : {"--data", "--weights"}) {
    std::string file =
        dir / (option[2] == 'd' ? "data.safetensors" : "model.safetensors");
    std::string text = readText(file);
    text.back() ^= 1;
    writeText(file, text);
    expectRefused({dir / "plan.json", option, file},
                  "expected data with hash xxh3:");
  }
  writeText(dir / "w.json", R"({"weight_map": {"a": "../w.safetensors"}})");
  expectRefused({dir / "plan.json", "--weights", dir / "w.json"},
                "expected a file in its folder for \"a\", got "
                "\"../w.safetensors\"");
  writeText(dir / "w.json", R"({"weight_map": {"a": "/etc/passwd"}})");
  expectRefused({dir / "plan.json", "--weights", dir / "w.json"},
                "expected a file in its folder");
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

TEST_F(FsdpRun, RefusesBadDataOptions) {
  writeSample(dir, samplePlan(2));
  std::string plan = dir / "plan.json", data = dir / "data.safetensors";
  for (const char *option : {"--shuffle-seed", "--token-inputs", "--eval-split",
                             "--documents", "--data-hash"})
    expectRefused(
        {plan, option, option == std::string("--documents") ? "cross" : "1"},
        std::string(option) + " requires --data");
  expectRefused({plan, "--data", data, "--shuffle-seed", "-1"},
                "--shuffle-seed: expected a whole number from 0 to ");
  expectRefused({plan, "--data", data, "--documents", "some"}, "--documents");
  expectRefused({plan, "--data", data, "--eval-split", "2"},
                "--eval-split: expected a fraction between 0 and 1");
  expectRefused({plan, "--data", data, "--eval-every", "1", "--eval-split",
                 "0.5", "--eval-data", data},
                "--eval-data excludes --eval-split");
  expectRefused({plan, "--data", "a:b"},
                "--data: expected [WEIGHT:]PATH[:DTYPE], where a path has no "
                "colon, got \"a:b\"");
  expectRefused({plan, "--data", "1:" + data, "--data", "0:" + data},
                "expected a weight above 0");
  expectRefused({plan, "--data", data, "--data", data, "--data-hash", "x"},
                "--data-hash: expected one source, got 2");
  expectRefused({plan, "--data", dir / "model.safetensors"},
                "is not an input of the plan");
  expectRefused({plan, "--data", dir / "none"}, "none: cannot open: ");
}

TEST_F(FsdpRun, MixesShufflesAndHoldsOutTensors) {
  writeSample(dir, samplePlan(2), 40);
  std::string data = dir / "data.safetensors";
  ToolResult result = runTool({dir / "plan.json", "--steps", "2", "--data",
                               "0.25:" + data, "--data", "0.75:" + data,
                               "--shuffle-seed", "3", "--eval-split", "0.5"});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, testing::StartsWith(
                              "data: 0.25 of " + data +
                              " (safetensors, 20 samples), 0.75 of " + data +
                              " (safetensors, 20 samples), shuffled by "
                              "seed 3\nstep:  1"));
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

/// A rank of a job at a port.
std::map<std::string, std::string> rankAt(int port, int rank, int ranks) {
  return {{"RANK", std::to_string(rank)},
          {"LOCAL_RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(ranks)},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", std::to_string(port)}};
}

TEST_F(FsdpRun, RefusesRanksOfAnotherJobAtItsPort) {
  writeSample(dir, samplePlan(2));
  for (const char *comm : {"shm", "gloo"}) {
    int port = freePort();
    std::vector<std::string> args = {dir / "plan.json", "--comm", comm,
                                     "--steps", "3"};
    std::vector<std::string> others = args;
    others.back() = "4";
    std::vector<ToolResult> results(2);
    std::thread first([&] { results[0] = runTool(args, rankAt(port, 0, 2)); });
    // Of a job that has no rank 0 here.
    ToolResult stranger = runTool(others, rankAt(port, 1, 2));
    results[1] = runTool(args, rankAt(port, 1, 2));
    first.join();
    EXPECT_EQ(stranger.status, 1);
    EXPECT_THAT(stranger.err,
                testing::MatchesRegex("fsdp-run: error: rank 1: another job is "
                                      "at 127.0.0.1:[0-9]+, which differs from "
                                      "this rank's in --steps\n"));
    for (const ToolResult &result : results)
      EXPECT_EQ(result.status, 0) << result.err;
  }
}

TEST_F(FsdpRun, RefusesRanksWithOtherData) {
  writeSample(dir, samplePlan(2));
  Tensors data = sampleData(32);
  data["x"][31][0] += 1;
  writeTensors(dir / "other.safetensors", data);
  std::filesystem::copy(dir / "data.safetensors", dir / "moved.safetensors");
  std::vector<std::string> args = {dir / "plan.json", "--steps", "3", "--data",
                                   dir / "data.safetensors"};
  // The same data may lie elsewhere.
  std::vector<std::string> moved = args;
  moved.back() = dir / "moved.safetensors";
  std::vector<std::string> shuffled = args, others = args;
  shuffled.insert(shuffled.end(), {"--shuffle-seed", "1"});
  others.back() = dir / "other.safetensors";
  int port = freePort();
  std::vector<ToolResult> results(2);
  std::thread first([&] { results[0] = runTool(args, rankAt(port, 0, 2)); });
  for (const auto &wrong : {shuffled, others}) {
    ToolResult stranger = runTool(wrong, rankAt(port, 1, 2));
    EXPECT_EQ(stranger.status, 1);
    EXPECT_THAT(stranger.err, HasSubstr("differs from this rank's in data\n"));
  }
  results[1] = runTool(moved, rankAt(port, 1, 2));
  first.join();
  for (const ToolResult &result : results)
    EXPECT_EQ(result.status, 0) << result.err;
}

TEST_F(FsdpRun, RefusesRanksWithOtherWeightsOrSeeds) {
  writeSample(dir, samplePlan(2));
  std::string weights = dir / "model.safetensors", copy = dir / "copy";
  std::filesystem::copy(weights, copy);
  Tensors changed = sampleWeights();
  changed["b"][4] += 1;
  writeTensors(dir / "other", changed);
  std::vector<std::string> args = {dir / "plan.json", "--weights", weights};
  auto with = [&](const std::vector<std::string> &more) {
    std::vector<std::string> all = {dir / "plan.json"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  int port = freePort();
  std::vector<ToolResult> results(2);
  std::thread first([&] { results[0] = runTool(args, rankAt(port, 0, 2)); });
  const std::pair<std::vector<std::string>, const char *> wrong[] = {
      {with({"--weights", dir / "other"}), "weights"},
      {with({"--weights", copy, "--seed", "1"}), "data, --seed, --init-seed"},
      {with({"--weights", copy, "--weights-hash", "xxh3:0"}),
       "weights, --weights-hash"}};
  for (const auto &[given, names] : wrong) {
    ToolResult stranger = runTool(given, rankAt(port, 1, 2));
    EXPECT_EQ(stranger.status, 1);
    EXPECT_THAT(stranger.err, HasSubstr("differs from this rank's in " +
                                        std::string(names) + "\n"));
  }
  results[1] = runTool(with({"--weights", copy}), rankAt(port, 1, 2));
  first.join();
  for (const ToolResult &result : results)
    EXPECT_EQ(result.status, 0) << result.err;
}

// The other host's copy of the plan's weights is another one.
TEST_F(FsdpRun, EveryFileOfWeightsIsChecked) {
  plan::Plan plan = samplePlan(2);
  writeTensors(dir / "model.safetensors", sampleWeights());
  plan.weights.hash = runtime::SafeTensors(dir / "model.safetensors").hash();
  writeSample(dir, plan);
  std::filesystem::create_directory(dir / "host");
  std::filesystem::copy(dir / "plan.json", dir / "host/plan.json");
  Tensors changed = sampleWeights();
  changed["b"][4] += 1;
  writeTensors(dir / "host/model.safetensors", changed);
  int port = freePort();
  std::vector<ToolResult> results(2);
  std::thread first(
      [&] { results[0] = runTool({dir / "plan.json"}, rankAt(port, 0, 2)); });
  results[1] = runTool({dir / "host/plan.json"}, rankAt(port, 1, 2));
  first.join();
  EXPECT_EQ(results[0].status, 1);
  EXPECT_EQ(results[0].err, "");
  EXPECT_EQ(results[1].status, 2);
  EXPECT_THAT(results[1].err,
              testing::MatchesRegex("fsdp-run: error: rank 1: [^\n]*host/"
                                    "model.safetensors: expected weights with "
                                    "hash [^\n]*\n"));
}

// The steps last until the second process is there; it ends them.
TEST_F(FsdpRun, RefusesASecondProcessInAPlace) {
  writeSample(dir, samplePlan(2));
  int port = freePort();
  std::vector<std::string> args = {dir / "plan.json", "--steps", "100000"};
  std::vector<ToolResult> results(3);
  std::vector<std::thread> threads;
  for (int process = 0; process < 3; ++process)
    threads.emplace_back([&, process] {
      results[size_t(process)] =
          runTool(args, rankAt(port, process == 0 ? 0 : 1, 2));
    });
  for (std::thread &thread : threads)
    thread.join();
  std::string refused;
  int failed = 0;
  for (size_t process : {1, 2})
    if (results[process].status != 0) {
      refused += results[process].err;
      ++failed;
    }
  EXPECT_GE(failed, 1);
  EXPECT_THAT(refused, HasSubstr("rank 1: two processes are rank 1 at "
                                 "127.0.0.1:"));
}

TEST_F(FsdpRun, SaysThatItsPortIsTaken) {
  writeSample(dir, samplePlan(2));
  int fd = socket(AF_INET6, SOCK_STREAM, 0);
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  socklen_t size = sizeof(address);
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr *>(&address), size), 0);
  ASSERT_EQ(listen(fd, 4), 0);
  getsockname(fd, reinterpret_cast<sockaddr *>(&address), &size);
  ToolResult result =
      runTool({dir / "plan.json"}, rankAt(ntohs(address.sin6_port), 0, 2));
  close(fd);
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err,
              testing::MatchesRegex(
                  "fsdp-run: error: rank 0: cannot serve the ranks' store at "
                  "127.0.0.1:[0-9]+: another program, or another job, is using "
                  "the port\n"));
}

TEST(DescribePosition, SaysWhatWasUnderWay) {
  plan::Plan plan = samplePlan(2);
  runtime::Position position;
  EXPECT_EQ(runtime::describePosition(plan, position),
            " before its first step");
  position.step = 2;
  position.instruction = int64_t(find<plan::OptimizerStep>(plan));
  EXPECT_THAT(
      runtime::describePosition(plan, position),
      testing::MatchesRegex(" at step 3, instruction [0-9]+: optimizer_step"));
  position.saving = true;
  EXPECT_EQ(runtime::describePosition(plan, position),
            " while the weights were saved after step 3");
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
