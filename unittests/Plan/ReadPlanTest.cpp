//===- ReadPlanTest.cpp - JSON reading and printing -----------------------===//
#include "Support/SamplePlan.h"
#include "fsdp/Plan/Digest.h"

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
    addEvaluation(plan);
    std::string withEvaluation = printPlan(plan);
    EXPECT_NE(withEvaluation, withInit);
    EXPECT_EQ(printPlan(parsePlan(withEvaluation, "p.json")), withEvaluation);
  }
}

TEST(ReadPlan, KeepsRecomputedCalls) {
  Plan plan = samplePlan(2);
  size_t first = find<Call>(plan);
  std::get<Call>(plan.instructions[first].kind).recompute = true;
  std::string text = printPlan(plan);
  Plan read = parsePlan(text, "p.json");
  EXPECT_TRUE(std::get<Call>(read.instructions[first].kind).recompute);
  EXPECT_EQ(printPlan(read), text);
}

TEST(ReadPlan, KeepsSchemas) {
  Plan plan = samplePlan(2);
  size_t first = find<Call>(plan);
  auto &call = std::get<Call>(plan.instructions[first].kind);
  call.op = "mine::f";
  call.overload = "a";
  call.schema = "mine::f.a(Tensor x, str name=\"a\") -> Tensor";
  std::string text = printPlan(plan);
  Plan read = parsePlan(text, "p.json");
  EXPECT_EQ(std::get<Call>(read.instructions[first].kind).schema, call.schema);
  EXPECT_EQ(printPlan(read), text);
}

TEST(ReadPlan, KeepsWhyAnInstructionStandsThere) {
  Plan plan = samplePlan(2);
  EXPECT_EQ(printPlan(plan).find("\"why\""), std::string::npos);
  size_t first = find<AllGather>(plan);
  plan.instructions[first].why = "of \"layers.0\", \xc3\xa9";
  std::string text = printPlan(plan);
  Plan read = parsePlan(text, "p.json");
  EXPECT_EQ(read.instructions[first].why, plan.instructions[first].why);
  EXPECT_EQ(printPlan(read), text);
  plan.instructions[first].why = "x";
  EXPECT_EQ(errorOf(with(printPlan(plan), "\"why\": \"x\"", "\"why\": \"\"")),
            "p.json: instructions[" + std::to_string(first) +
                "].why: expected a non-empty string, got \"\"");
}

TEST(ReadPlan, RoundTripsTrainingPolicy) {
  Plan plan = samplePlan(2);
  plan.optimizer.name = "plugin";
  plan.optimizer.library = "lib/liblion.so";
  plan.optimizer.options = {{"beta1", 0.9}, {"beta2", 0.99}};
  plan.paramGroups.push_back(plan.optimizer);
  plan.paramGroups[0].lr = 1e-5;
  plan.lrSchedule = LRSchedule{2, "cosine", 10, 0.1};
  plan.accumulationSteps = 3;
  auto at = plan.instructions.begin() + long(find<OptimizerStep>(plan));
  auto &step = std::get<OptimizerStep>(at->kind);
  step.groups = {0, 1, 0};
  Accumulate sums{step.params, step.grads, {}};
  Unscale unscale{step.params, {}, {}, true};
  ClipGradNorm clip{step.params, {}, {}, 0.5, INFINITY};
  auto renew = [&](ValueId grad) {
    plan.values.push_back(plan.values[size_t(grad)]);
    return ValueId(plan.values.size()) - 1;
  };
  for (ValueId &grad : step.grads) {
    sums.outs.push_back(renew(grad));
    unscale.ins.push_back(sums.outs.back());
    unscale.outs.push_back(renew(grad));
    clip.ins.push_back(unscale.outs.back());
    clip.outs.push_back(renew(grad));
    grad = clip.outs.back();
  }
  at = plan.instructions.insert(at, {clip, Phase::Optimizer, -1, {}});
  at = plan.instructions.insert(at, {unscale, Phase::Optimizer, -1, {}});
  plan.gradScaler = GradScaler{1024, 4, 0.25, 10};
  plan.optimizer.fused = true;
  plan.values.push_back({{}, DType::Float32});
  auto scale = ValueId(plan.values.size()) - 1;
  at =
      plan.instructions.insert(at, {LossScale{scale}, Phase::Backward, -1, {}});
  plan.instructions.insert(at, {sums, Phase::Backward, -1, {}});
  std::string text = printPlan(plan);
  EXPECT_THAT(text, HasSubstr("\"norm_type\": {\"f\": \"inf\"}"));
  EXPECT_THAT(text, HasSubstr("\"options\": {\"beta1\": 0.9"));
  EXPECT_THAT(text, HasSubstr("\"growth_interval\": 10"));
  EXPECT_THAT(text, HasSubstr("\"deferred\": true"));
  EXPECT_EQ(printPlan(parsePlan(text, "p.json")), text);
}

TEST(LRSchedule, FollowsItsFormula) {
  LRSchedule cosine{2, "cosine", 6, 0.1};
  EXPECT_EQ(cosine.factor(0), 0.5);
  EXPECT_EQ(cosine.factor(1), 1.0);
  EXPECT_NEAR(cosine.factor(3), 0.1 + 0.9 * 0.5, 1e-15);
  EXPECT_NEAR(cosine.factor(5), 0.1, 1e-15);
  EXPECT_EQ(cosine.factor(50), cosine.factor(5));
  LRSchedule linear{0, "linear", 4, 0};
  EXPECT_EQ(linear.factor(0), 0.75);
  EXPECT_EQ(linear.factor(3), 0.0);
  LRSchedule constant{1, "constant", 2, 0};
  EXPECT_EQ(constant.factor(9), 1.0);
}

TEST(ReadPlan, RoundTripsReplicas) {
  Plan plan = samplePlan(4, false, 2);
  std::get<AllReduce>(plan.instructions[find<AllReduce>(plan)].kind)
      .postdivide = 4;
  std::string text = printPlan(plan);
  EXPECT_THAT(text, HasSubstr("\"postdivide\": 4.0"));
  EXPECT_THAT(text, HasSubstr("\"replicas\": 2"));
  EXPECT_THAT(text, HasSubstr("{\"all_reduce\": 0"));
  EXPECT_EQ(printPlan(parsePlan(text, "p.json")), text);
}

TEST(ReadPlan, RoundTripsWhatIsReducedInTheLastMicrobatch) {
  Plan plan = samplePlan(4, false, 2);
  accumulatePartial(plan);
  std::string text = printPlan(plan);
  EXPECT_THAT(text,
              testing::ContainsRegex("\"all_reduce\": 0.*\"when\": \"last\""));
  EXPECT_EQ(printPlan(parsePlan(text, "p.json")), text);
  plan = samplePlan(2);
  accumulateWhole(plan);
  text = printPlan(plan);
  EXPECT_THAT(text, testing::ContainsRegex(
                        "\"reduce_scatter\": 1.*\"when\": \"last\""));
  EXPECT_EQ(printPlan(parsePlan(text, "p.json")), text);
}

TEST(ReadPlan, RoundTripsIgnoredParameters) {
  Plan plan = samplePlan(2);
  // "scale" is the last parameter of the root unit.
  plan.units[1].params.pop_back();
  plan.params[3].unit = -1;
  auto &gather = std::get<AllGather>(plan.instructions[0].kind);
  ReadParam read{3, gather.outs.back()};
  gather.outs.pop_back();
  plan.instructions.insert(plan.instructions.begin(),
                           {read, Phase::Forward, -1, {}});
  std::string text = printPlan(plan);
  EXPECT_THAT(text, HasSubstr("{\"read_param\": 3"));
  EXPECT_EQ(printPlan(parsePlan(text, "p.json")), text);
}

TEST(ReadPlan, KeepsMixedPrecision) {
  Plan plan = samplePlan(2);
  auto &reduce = std::get<ReduceScatter>(
      plan.instructions[find<ReduceScatter>(plan)].kind);
  reduce.reduceDtype = DType::Float16;
  reduce.divisors = {{2.0, 1.5}};
  plan.params[3].computeDtype = DType::Float32;
  std::string text = printPlan(plan);
  Plan again = parsePlan(text, "p.json");
  auto &read = std::get<ReduceScatter>(
      again.instructions[find<ReduceScatter>(plan)].kind);
  EXPECT_EQ(read.reduceDtype, DType::Float16);
  EXPECT_EQ(read.divisors, (ReduceScatter::Divisors{2.0, 1.5}));
  EXPECT_EQ(again.params[3].computeDtype, DType::Float32);
  EXPECT_EQ(again.params[0].computeDtype, std::nullopt);
  EXPECT_THAT(errorOf(with(text, R"("reduce_dtype": "float16")",
                           R"("reduce_dtype": "half")")),
              HasSubstr(R"(.reduce_dtype: expected a dtype, got "half")"));
  EXPECT_THAT(errorOf(with(text, R"("predivide": 2.0, )", "")),
              HasSubstr("predivide"));
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

TEST(ReadPlan, KeepsComplexNumbers) {
  Plan plan = samplePlan(1);
  auto &args = std::get<Call>(plan.instructions[find<Call>(plan)].kind).args;
  args.push_back({std::complex<double>(1, -0.5)});
  args.push_back({std::complex<double>(-INFINITY, 0)});
  std::string text = printPlan(plan);
  EXPECT_THAT(text, HasSubstr("{\"c\": [1.0, -0.5]}"));
  Plan read = parsePlan(text, "p.json");
  EXPECT_EQ(std::get<Call>(read.instructions[find<Call>(read)].kind).args,
            args);
  EXPECT_EQ(printPlan(read), text);
  EXPECT_THAT(errorOf(with(text, "[1.0, -0.5]", "[1.0]")),
              HasSubstr(".c: expected a real and an imaginary part, got 1"));
}

TEST(ReadPlan, KeepsEveryDType) {
  for (const char *name :
       {"float32", "float64", "float16", "bfloat16", "int64", "int32", "int16",
        "int8", "uint8", "bool", "uint16", "uint32", "uint64", "float8_e4m3fn",
        "float8_e5m2", "complex32", "complex64", "complex128"}) {
    std::optional<DType> dtype = parseDType(name);
    ASSERT_TRUE(dtype) << name;
    EXPECT_EQ(dtypeName(*dtype), name);
    EXPECT_GT(byteWidth(*dtype), 0);
    EXPECT_EQ(isInteger(*dtype),
              std::string(name).find("int") <= 1 || std::string(name) == "bool")
        << name;
  }
}

TEST(ReadPlan, KeepsStridesAndLines) {
  Plan plan = samplePlan(2);
  std::string without = printPlan(plan);
  EXPECT_EQ(without.find("\"strides\""), std::string::npos);
  EXPECT_EQ(without.find("\"lines\""), std::string::npos);
  const auto &call = std::get<Call>(plan.instructions[find<Call>(plan)].kind);
  plan.inputs[0].strides = {1, plan.inputs[0].spec.shape[0]};
  plan.buffers[0].strides = {0};
  plan.values[size_t(call.outs[0])].strides = {1, 4};
  plan.lines = {"models/tiny.py:12"};
  plan.capturedFor = {"cuda",
                      "sm_90",
                      "2.15.0",
                      {{"deterministic_algorithms", "warn"},
                       {"float32_matmul_precision", "high"}}};
  plan.instructions[find<Call>(plan)].line = 0;
  std::string text = printPlan(plan);
  Plan read = parsePlan(text, "p.json");
  EXPECT_EQ(read.inputs[0].strides, plan.inputs[0].strides);
  EXPECT_EQ(read.buffers[0].strides, plan.buffers[0].strides);
  EXPECT_EQ(read.values[size_t(call.outs[0])].strides, Strides({1, 4}));
  EXPECT_EQ(read.lines, plan.lines);
  EXPECT_EQ(read.capturedFor, plan.capturedFor);
  EXPECT_EQ(printPlan(read), text);
}

TEST(ReadPlan, KeepsWhichParametersAreUnused) {
  Plan plan = samplePlan(2);
  plan.params[3].requiresGrad = true;
  EXPECT_THAT(errorOf(printPlan(plan)), HasSubstr("(P37)"));
  plan.params[3].unused = true;
  std::string text = printPlan(plan);
  EXPECT_TRUE(parsePlan(text, "p.json").params[3].unused);
  EXPECT_EQ(printPlan(parsePlan(text, "p.json")), text);
}

TEST(Strides, AreDenseWhereNoElementIsLeftOutOrTwice) {
  EXPECT_TRUE(areDense({2, 3}, {3, 1}));
  EXPECT_TRUE(areDense({2, 3}, {1, 2}));
  EXPECT_TRUE(areDense({2, 5, 3}, {3, 0, 1}));
  EXPECT_TRUE(areDense({1, 3}, {7, 1}));
  EXPECT_TRUE(areDense({0, 3}, {9, 9}));
  EXPECT_FALSE(areDense({2, 3}, {4, 1}));
  EXPECT_FALSE(areDense({2, 3}, {1, 1}));
  EXPECT_EQ(fullStrides({2, 0, 3}, {}), Strides({3, 3, 1}));
  EXPECT_EQ(fullStrides({2, 3}, {1, 2}), Strides({1, 2}));
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
  EXPECT_THAT(errorOf(with(text, "\"version\": 3", "\"version\": 7")),
              HasSubstr("version: expected plan version 3, got 7"));
  EXPECT_THAT(errorOf("{\"version\": 7, \"other\": []}"),
              HasSubstr("expected plan version 3, got 7"));
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
            "fused, read_buffer, read_param, constant, all_gather, reshard, "
            "reduce_scatter, all_reduce, copy_to_device, copy_to_host, "
            "offload_activation, reload_activation, accumulate, loss_scale, "
            "unscale, clip_grad_norm, stage_state, optimizer_step, wait, "
            "write_param or "
            "write_buffer)");
  EXPECT_EQ(errorOf("[]"), "p.json: expected an object, got array");
}

TEST(ReadPlan, TakesNullOnlyWhereItStandsForNone) {
  std::string text = printPlan(samplePlan(2));
  EXPECT_THAT(text, HasSubstr("\"lr_schedule\": null"));
  for (const char *key : {"host_arena", "memory_budget"})
    EXPECT_THAT(errorOf(with(text, "\"units\": ",
                             '"' + std::string(key) + "\": null, \"units\": ")),
                HasSubstr("got null"))
        << key;
  EXPECT_THAT(
      errorOf(with(text, ", \"requires_grad\"",
                   ", \"compute_dtype\": null, \"requires_grad\"")),
      HasSubstr("params[0].compute_dtype: expected a string, got null"));
  EXPECT_THAT(errorOf(with(text, "{\"reduce_scatter\"",
                           "{\"reduce_dtype\": null, \"reduce_scatter\"")),
              HasSubstr(".reduce_dtype: expected a string, got null"));
}

TEST(ReadPlan, TakesNoMoreKeysOfAWait) {
  Plan plan = samplePlan(2);
  plan.instructions.insert(plan.instructions.begin(),
                           {Wait{}, Phase::Forward, -1, {}});
  std::string text = printPlan(plan);
  for (const char *key : {"why", "line", "stream", "waits", "buffer"})
    EXPECT_THAT(errorOf(with(text, "{\"wait\": ",
                             "{\"" + std::string(key) + "\": 0, \"wait\": ")),
                HasSubstr("unknown key \"" + std::string(key) + "\""));
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

TEST(ReadPlan, NoticesEveryBit) {
  const std::string text = printPlan(samplePlan(2));
  const Plan plan = parsePlan(text, "p.json");
  for (size_t bit = 0; bit < text.size() * 8; bit += 5) {
    std::string flipped = text;
    flipped[bit / 8] = char(flipped[bit / 8] ^ (1 << bit % 8));
    try {
      // Between the tokens, a blank may have become another.
      EXPECT_EQ(printPlan(parsePlan(flipped, "p.json")), text) << bit;
    } catch (const PlanError &) {
    }
  }
}

TEST(ReadPlan, ChecksTheDigestWhereThereIsOne) {
  std::string text = printPlan(samplePlan(2));
  std::string digest = digestOf(samplePlan(2));
  EXPECT_THAT(text,
              testing::EndsWith(",\n  \"digest\": \"" + digest + "\"\n}\n"));
  std::string changed = with(text, "\"lr\": ", "\"lr\": 1");
  EXPECT_THAT(errorOf(changed), HasSubstr("p.json: digest: expected \"xxh3:"));
  EXPECT_THAT(errorOf(changed), HasSubstr(", got \"" + digest + "\": "));
  std::string without = with(changed, ",\n  \"digest\": \"" + digest + '"', "");
  EXPECT_EQ(errorOf(without), "no error");
  EXPECT_EQ(errorOf(with(text, "\n  \"model\"", "\"model\"")), "no error");
  EXPECT_THAT(errorOf(with(text, digest, "")),
              HasSubstr("digest: expected \"" + digest + "\", got \"\""));
}

TEST(ReadPlan, BoundsMicrobatches) {
  std::string text = printPlan(samplePlan(2));
  EXPECT_THAT(errorOf(with(text, "\"accumulation_steps\": 1",
                           "\"accumulation_steps\": 1048577")),
              HasSubstr("accumulation_steps: expected an integer in [1, "
                        "1048576], got 1048577"));
}

TEST(ReadPlan, RefusesNamesThatAreNotUtf8) {
  Plan plan = samplePlan(2);
  plan.model = "\xff";
  EXPECT_THROW(printPlan(plan), PlanError);
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
