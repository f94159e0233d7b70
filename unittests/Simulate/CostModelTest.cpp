//===- CostModelTest.cpp - seconds of instructions ------------------------===//
#include "fsdp/Simulate/CostModel.h"
#include "fsdp/Simulate/Simulator.h"

#include "Support/SamplePlan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

using namespace fsdp;
using namespace fsdp::plan;
using namespace fsdp::simulate;

namespace {

DeviceModel device() {
  DeviceModel device;
  device.name = "test";
  device.peakFlops = {{DType::Float32, 100}, {DType::BFloat16, 400}};
  device.matmulFraction = 0.5;
  device.attentionFraction = 0.25;
  device.memoryBandwidth = 1e9;
  device.ranksPerHost = 8;
  device.withinHost = {0, 1000};
  device.betweenHosts = {0, 100};
  return device;
}

/// A plan of calls alone.
struct Calls {
  Plan plan;

  ValueId value(std::vector<int64_t> shape, DType dtype = DType::Float32) {
    plan.values.emplace_back(std::move(shape), dtype);
    return ValueId(plan.values.size()) - 1;
  }
  ValueId view(ValueId of, std::vector<int64_t> shape) {
    ValueId id = value(std::move(shape), plan.values[of].dtype);
    plan.values[id].storage = of;
    return id;
  }
  Call &add(std::string op, ArgList args, std::vector<ValueId> outs) {
    plan.instructions.push_back(
        {Call{{std::move(op), ""}, std::move(args), std::move(outs)}});
    return std::get<Call>(plan.instructions.back().kind);
  }
  double seconds(const DeviceModel &on, size_t index = 0) const {
    return costOf(plan, on).instructions[index].seconds;
  }
};

Arg t(ValueId id) { return {TensorArg{id}}; }
Arg flag(bool value) { return {value}; }
Arg none() { return {NoneArg{}}; }

TEST(CostModel, MatrixProductsTakeTheirFlops) {
  Calls c;
  ValueId a = c.value({3, 4}), b = c.value({4, 5}), r = c.value({3, 5});
  c.add("aten::mm", {t(a), t(b)}, {r});
  EXPECT_DOUBLE_EQ(c.seconds(device()), 2. * 3 * 4 * 5 / 50);
  ValueId x = c.value({2, 3, 4}), y = c.value({2, 4, 5}),
          z = c.value({2, 3, 5});
  c.add("aten::bmm", {t(x), t(y)}, {z});
  EXPECT_DOUBLE_EQ(c.seconds(device(), 1), 2. * 2 * 3 * 4 * 5 / 50);
  ValueId bias = c.value({5});
  c.add("aten::addmm", {t(bias), t(a), t(b)}, {r});
  EXPECT_DOUBLE_EQ(c.seconds(device(), 2), 2. * 3 * 4 * 5 / 50);
  // Of the dtype that is multiplied.
  Calls h;
  ValueId ha = h.value({3, 4}, DType::BFloat16),
          hb = h.value({4, 5}, DType::BFloat16),
          hr = h.value({3, 5}, DType::BFloat16);
  h.add("aten::mm", {t(ha), t(hb)}, {hr});
  EXPECT_DOUBLE_EQ(h.seconds(device()), 2. * 3 * 4 * 5 / 200);
  // Or the time of its bytes, where that is longer.
  DeviceModel slow = device();
  slow.memoryBandwidth = 1;
  slow.opOverhead = 7;
  EXPECT_DOUBLE_EQ(h.seconds(slow), 2 * (12 + 20 + 15) + 7);
}

TEST(CostModel, ConvolutionsTakeTheirFlops) {
  Calls c;
  ValueId in = c.value({2, 3, 8, 8}), w = c.value({6, 3, 5, 5}),
          out = c.value({2, 6, 4, 4});
  ArgList empty;
  c.add("aten::convolution",
        {t(in), t(w), none(), {empty}, {empty}, {empty}, flag(false)}, {out});
  double forward = 2. * (2 * 6 * 4 * 4) * (3 * 5 * 5);
  EXPECT_DOUBLE_EQ(c.seconds(device()), forward / 50);
  ValueId gi = c.value({2, 3, 8, 8}), gw = c.value({6, 3, 5, 5});
  c.add("aten::convolution_backward",
        {t(out),
         t(in),
         t(w),
         none(),
         {empty},
         {empty},
         {empty},
         flag(false),
         {empty},
         {int64_t{1}},
         {ArgList{flag(false), flag(true), flag(false)}}},
        {-1, gw, -1});
  EXPECT_DOUBLE_EQ(c.seconds(device(), 1), forward / 50);
  std::get<Call>(c.plan.instructions[1].kind).args[10] = {
      ArgList{flag(true), flag(true), flag(false)}};
  std::get<Call>(c.plan.instructions[1].kind).outs = {gi, gw, -1};
  EXPECT_DOUBLE_EQ(c.seconds(device(), 1), 2 * forward / 50);
}

TEST(CostModel, AttentionIsHalfWhereItIsCausal) {
  Calls c;
  ValueId q = c.value({1, 2, 6, 4}), k = c.value({1, 1, 8, 4}),
          v = c.value({1, 1, 8, 4}), out = c.value({1, 2, 6, 4}),
          lse = c.value({1, 6, 2});
  ArgList args = {t(q), t(k), t(v), {0.0}, flag(false), none(), none()};
  c.add("aten::_scaled_dot_product_flash_attention_for_cpu", args, {out, lse});
  double forward = 4. * 2 * 6 * 8 * 4;
  EXPECT_DOUBLE_EQ(c.seconds(device()), forward / 25);
  std::get<Call>(c.plan.instructions[0].kind).args[4] = flag(true);
  EXPECT_DOUBLE_EQ(c.seconds(device()), forward / 2 / 25);
  EXPECT_DOUBLE_EQ(costOf(c.plan, device()).modelFlops, forward);
  c.add("aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        {t(out),
         t(q),
         t(k),
         t(v),
         t(out),
         t(lse),
         {0.0},
         flag(false),
         none(),
         none()},
        {q, k, v});
  EXPECT_DOUBLE_EQ(c.seconds(device(), 1), forward * 2.5 / 25);
  EXPECT_DOUBLE_EQ(costOf(c.plan, device()).modelFlops, forward * 3);
}

TEST(CostModel, OthersTakeTheirBytes) {
  DeviceModel slow = device();
  slow.memoryBandwidth = 8;
  slow.memoryFraction = 0.5;
  slow.opOverhead = 100;
  Calls c;
  ValueId a = c.value({10}), wide = c.view(a, {30, 10}), b = c.value({30, 10}),
          r = c.value({30, 10});
  // A broadcast operand is read once; an operand that comes twice too.
  c.add("aten::mul", {t(wide), t(b)}, {r});
  EXPECT_DOUBLE_EQ(c.seconds(slow), 4. * (10 + 300 + 300) / 4 + 100);
  c.add("aten::mul", {t(b), t(b)}, {r});
  EXPECT_DOUBLE_EQ(c.seconds(slow, 1), 4. * (300 + 300) / 4 + 100);
  // Views and allocations are no kernels; a write in place is.
  c.add("aten::view", {t(b)}, {c.view(b, {300})});
  EXPECT_EQ(c.seconds(slow, 2), 0);
  c.add("aten::empty", {}, {c.value({300})});
  EXPECT_EQ(c.seconds(slow, 3), 0);
  c.add("aten::relu_", {t(b)}, {c.view(b, {30, 10})});
  EXPECT_DOUBLE_EQ(c.seconds(slow, 4), 4. * 600 / 4 + 100);
  c.add("aten::zero_", {t(b)}, {c.view(b, {30, 10})});
  EXPECT_DOUBLE_EQ(c.seconds(slow, 5), 4. * 300 / 4 + 100);
  // Of the table only the rows that are looked up.
  ValueId table = c.value({1000, 4}), ids = c.value({3}, DType::Int64),
          rows = c.value({3, 4});
  c.add("aten::embedding", {t(table), t(ids)}, {rows});
  EXPECT_DOUBLE_EQ(c.seconds(slow, 6), (2. * 48 + 24) / 4 + 100);
}

TEST(CostModel, RecomputedCallsAreNoModelFlops) {
  Calls c;
  ValueId a = c.value({2, 2});
  c.add("aten::mm", {t(a), t(a)}, {c.value({2, 2})});
  c.add("aten::mm", {t(a), t(a)}, {c.value({2, 2})}).recompute = true;
  c.plan.accumulationSteps = 3;
  StepCost cost = costOf(c.plan, device());
  EXPECT_EQ(cost.modelFlops, 3 * 16);
  EXPECT_EQ(cost.instructions[1].seconds, cost.instructions[0].seconds);
  EXPECT_DOUBLE_EQ(modelFlopsUtilization(cost, device(), 0.96), 0.5);
}

TEST(CostModel, ChainsOfPointwiseOperatorsAreOneKernel) {
  DeviceModel fused = device();
  fused.memoryBandwidth = 4;
  fused.opOverhead = 100;
  Calls c;
  ValueId a = c.value({10}), b = c.value({10}), ab = c.value({10}),
          e = c.value({10}), ev = c.view(e, {2, 5}), m = c.value({2, 2}),
          w = c.value({5, 2}), last = c.value({10});
  c.add("aten::mul", {t(a), t(b)}, {ab});
  c.add("aten::exp", {t(ab)}, {e});
  c.add("aten::view", {t(e)}, {ev});
  c.add("aten::mm", {t(ev), t(w)}, {m});
  c.add("aten::add", {t(ab), t(a)}, {last});
  c.plan.loss = last;
  auto seconds = [&](size_t i) { return c.seconds(fused, i); };
  EXPECT_EQ(seconds(1), 20 + 100);
  fused.fusePointwise = true;
  // Reads a and b, writes nothing that is only used inside.
  EXPECT_EQ(seconds(0), 20 + 100);
  EXPECT_EQ(seconds(1), 10); // for the product
  EXPECT_EQ(seconds(4), 10); // the loss
  // An operator behind the product is another kernel.
  ValueId tail = c.value({2, 2}), both = c.value({2, 2});
  c.add("aten::neg", {t(m)}, {tail});
  c.add("aten::mul", {t(tail), t(e)}, {both});
  EXPECT_EQ(seconds(5), 4 + 100);
  EXPECT_EQ(seconds(0), 20 + 100);
}

TEST(CostModel, CollectivesTakeTheirPaddedBytes) {
  // Unit "layer" has w1 [3, 7], in two rows a rank at two ranks; the root unit
  // w2 [7, 5], b [5] and scale [1].
  Plan plan = test::samplePlan(2);
  StepCost cost = costOf(plan, device());
  size_t root = test::find<AllGather>(plan),
         layer = test::find<AllGather>(plan, 1);
  EXPECT_DOUBLE_EQ(cost.instructions[root].seconds,
                   4. * (8 * 5 + 6 + 2) / 2 / 1000);
  EXPECT_DOUBLE_EQ(cost.instructions[layer].seconds, 4. * 4 * 7 / 2 / 1000);
  EXPECT_EQ(cost.instructions[layer].medium, Medium::WithinHost);
  // In the dtype that is gathered.
  for (Param &param : plan.params)
    param.computeDtype = DType::BFloat16;
  EXPECT_DOUBLE_EQ(costOf(plan, device()).instructions[layer].seconds,
                   2. * 4 * 7 / 2 / 1000);
  for (size_t i = 0; i < plan.instructions.size(); ++i)
    if (auto *reduce = std::get_if<ReduceScatter>(&plan.instructions[i].kind);
        reduce && reduce->unit == 0) {
      EXPECT_DOUBLE_EQ(cost.instructions[i].seconds, 4. * 4 * 7 / 2 / 1000);
      reduce->reduceDtype = DType::Float64;
      EXPECT_DOUBLE_EQ(costOf(plan, device()).instructions[i].seconds,
                       8. * 4 * 7 / 2 / 1000);
    }
}

TEST(CostModel, ReplicasReduceOverTheirAxis) {
  Plan plan = test::samplePlan(16, false, /*replicas=*/2);
  StepCost cost = costOf(plan, device());
  const auto &all = plan.instructions[test::find<AllReduce>(plan)];
  double bytes = 0;
  for (ValueId id : std::get<AllReduce>(all.kind).ins)
    bytes += double(plan.values[id].numBytes());
  const Cost &reduce = cost.instructions[test::find<AllReduce>(plan)];
  EXPECT_DOUBLE_EQ(reduce.seconds, 2 * bytes / 2 / 100);
  EXPECT_EQ(reduce.medium, Medium::BetweenHosts);
  EXPECT_EQ(cost.instructions[test::find<AllGather>(plan)].medium,
            Medium::WithinHost);
}

TEST(CostModel, ModelAxesAreBesideFsdps) {
  // Four ranks of one host are as far apart as two hosts where the model takes
  // four neighbours for itself.
  Plan plan = test::samplePlan(4);
  size_t gather = test::find<AllGather>(plan);
  const Cost alone = costOf(plan, device()).instructions[gather];
  EXPECT_EQ(alone.medium, Medium::WithinHost);
  plan.modelParallel = {4, 4, {{"tensor", 4, 1}}};
  EXPECT_EQ(plan.jobRanks(), 16);
  const Cost apart = costOf(plan, device()).instructions[gather];
  EXPECT_EQ(apart.medium, Medium::BetweenHosts);
  // Half of the bytes over two links of 100, in place of 3/4 at 1000.
  EXPECT_DOUBLE_EQ(apart.seconds, alone.seconds / 0.75 * 1000 * 0.5 / 200);
}

TEST(CostModel, CollectivesOfTheModelTakeTheirAxis) {
  Calls c;
  ValueId x = c.value({8, 4}), whole = c.value({32, 4}), part = c.value({2, 4});
  std::string axis = "tensor";
  auto add = [&](const char *op, ArgList args, ValueId out) {
    c.add("_c10d_functional::" + std::string(op), std::move(args), {out});
  };
  Arg four = {int64_t(4)}, sum = {std::string("sum")}, on = {axis};
  add("all_gather_into_tensor", {t(x), four, on}, whole);
  add("reduce_scatter_tensor", {t(x), sum, four, on}, part);
  add("all_reduce", {t(x), sum, on}, c.value({8, 4}));
  add("all_to_all_single", {t(x), {ArgList{}}, {ArgList{}}, on},
      c.value({8, 4}));
  c.plan.modelParallel = {4, 4, {{"tensor", 4, 1}}};
  EXPECT_DOUBLE_EQ(c.seconds(device(), 0), 4. * 32 * 4 * 3 / 4 / 1000);
  EXPECT_DOUBLE_EQ(c.seconds(device(), 1), 4. * 8 * 4 * 3 / 4 / 1000);
  EXPECT_DOUBLE_EQ(c.seconds(device(), 2), 2 * 4. * 8 * 4 * 3 / 4 / 1000);
  EXPECT_DOUBLE_EQ(c.seconds(device(), 3), 4. * 8 * 4 * 3 / 4 / 1000);
  // Neighbours on different hosts.
  c.plan.modelParallel->axes[0].stride = 8;
  EXPECT_DOUBLE_EQ(c.seconds(device(), 0), 4. * 32 * 4 * 3 / 4 / 100);
  // They are on the compute stream, but no computation.
  StepCost cost = costOf(c.plan, device());
  Timeline timeline = simulate::simulate(c.plan, cost, device());
  EXPECT_EQ(timeline.busy[size_t(Stream::Compute)], 0);
  EXPECT_DOUBLE_EQ(timeline.busy[size_t(Stream::ModelAxes)], timeline.seconds);
  EXPECT_DOUBLE_EQ(timeline.exposedCommunication(), timeline.seconds);
}

TEST(CostModel, RanksDifferInTheirShards) {
  // w1 [3, 7] at two ranks: two rows, and one.
  Plan plan = test::samplePlan(2);
  size_t step = test::find<OptimizerStep>(plan);
  double first = costOf(plan, device(), nullptr, 0).instructions[step].seconds;
  double second = costOf(plan, device(), nullptr, 1).instructions[step].seconds;
  // SGD reads parameter and gradient and writes the parameter.
  EXPECT_DOUBLE_EQ(first, 4. * 3 * (2 * 7 + 4 * 5 + 3) / 1e9);
  EXPECT_DOUBLE_EQ(second, 4. * 3 * (7 + 3 * 5 + 2) / 1e9);
}

TEST(CostModel, CopiesGoToTheComputeStream) {
  Plan plan = test::samplePlan(2);
  DeviceModel copies = device();
  copies.collectiveCopies = true;
  size_t gather = test::find<AllGather>(plan);
  double bytes = 4. * (8 * 5 + 6 + 2);
  EXPECT_DOUBLE_EQ(costOf(plan, copies).instructions[gather].seconds,
                   bytes / 2 / 1000 + 2 * bytes / 1e9);
  // Beside compute: where it is first used.
  plan.instructions[gather].stream = Stream::AllGather;
  plan.instructions[gather].records = 0;
  size_t user = test::find<Call>(plan);
  plan.instructions[user].waits = {0};
  StepCost cost = costOf(plan, copies), plain = costOf(plan, device());
  EXPECT_DOUBLE_EQ(cost.instructions[gather].seconds, bytes / 2 / 1000);
  EXPECT_DOUBLE_EQ(cost.instructions[user].seconds,
                   plain.instructions[user].seconds + 2 * bytes / 1e9);
}

TEST(CostModel, AProfileOfThePlanIsTakenByPosition) {
  Plan plan = test::samplePlan(2);
  Profile profile;
  profile.worldSize = 2;
  profile.outsideSeconds = 0.25;
  for (size_t i = 0; i < plan.instructions.size(); ++i)
    profile.instructions.push_back(
        {signature(plan, plan.instructions[i]), double(i)});
  StepCost cost = costOf(plan, device(), &profile);
  EXPECT_TRUE(cost.samePlan);
  EXPECT_EQ(cost.instructions[3].seconds, 3);
  EXPECT_EQ(cost.outsideSeconds, 0.25);
  EXPECT_EQ(cost.measured, int64_t(plan.instructions.size()));

  // Of another plan: the mean of those alike; the rest is modelled.
  profile.instructions = {{profile.instructions[2].what, 1},
                          {profile.instructions[2].what, 3}};
  cost = costOf(plan, device(), &profile);
  EXPECT_FALSE(cost.samePlan);
  EXPECT_EQ(cost.instructions[2].seconds, 2);
  EXPECT_EQ(cost.measured, 1);
  EXPECT_EQ(cost.instructions[4].seconds,
            costOf(plan, device()).instructions[4].seconds);
  EXPECT_GT(cost.modelled, 0);
}

TEST(CostModel, FasterDevicesAreNotSlower) {
  Plan plan = test::samplePlan(16, false, 2);
  auto seconds = [&](const DeviceModel &on) {
    return simulate::simulate(plan, costOf(plan, on), on).seconds;
  };
  double before = seconds(device());
  for (auto change : std::vector<void (*)(DeviceModel &)>{
           [](DeviceModel &d) { d.peakFlops[DType::Float32] *= 2; },
           [](DeviceModel &d) { d.memoryBandwidth *= 2; },
           [](DeviceModel &d) { d.withinHost.bandwidth *= 2; },
           [](DeviceModel &d) { d.betweenHosts.bandwidth *= 2; }}) {
    DeviceModel faster = device();
    change(faster);
    EXPECT_LT(seconds(faster), before);
  }
}

TEST(CostModel, TokensAreElementsOfAnIntegerMatrix) {
  Plan plan = test::samplePlan(2);
  EXPECT_EQ(tokensPerStep(plan), 2 * test::kBatch);
  plan.accumulationSteps = 3;
  plan.inputs.push_back({"tokens", {{4, 7}, DType::Int64}, 0, 0, 2});
  EXPECT_EQ(tokensPerStep(plan), 2 * 3 * 28);
}

} // namespace
