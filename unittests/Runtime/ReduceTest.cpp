//===- ReduceTest.cpp - sums of gradients against ATen's ------------------===//
#include "fsdp/Runtime/Collectives/Reduce.h"
#include "Support/Fixtures.h"
#include "Support/SamplePlan.h"
#include "fsdp/Runtime/Collectives/Comm.h"
#include "fsdp/Runtime/Collectives/ShmComm.h"
#include "fsdp/Runtime/Memory/Layout.h"

#include <ATen/Context.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scalar_tensor.h>
#include <gtest/gtest.h>

#include <cstring>
#include <tuple>

namespace fsdp::test {
namespace {

using namespace runtime;
using plan::DType;

constexpr DType kFloats[] = {DType::Float32, DType::Float64, DType::Float16,
                             DType::BFloat16};

/// What FSDP2 does, operator by operator.
at::Tensor expected(const GradReduction &how,
                    const std::vector<at::Tensor> &grads) {
  at::Tensor sum;
  for (const at::Tensor &grad : grads) {
    at::Tensor term = grad.to(scalarType(how.reduce), false, /*copy=*/true);
    if (how.predivide != 1)
      term.div_(how.predivide);
    if (how.premultiply != 1)
      term.mul_(at::scalar_tensor(how.premultiply, term.options()));
    sum = sum.defined() ? sum.add(term) : term;
  }
  if (how.postdivide != 1)
    sum.div_(how.postdivide);
  return sum.to(scalarType(how.out));
}

at::Tensor reduced(const GradReduction &how,
                   const std::vector<at::Tensor> &grads) {
  std::vector<const std::byte *> in;
  for (const at::Tensor &grad : grads)
    in.push_back(static_cast<const std::byte *>(grad.const_data_ptr()));
  at::Tensor out = at::empty(grads[0].sizes(), scalarType(how.out));
  reduceInOrder(how, out.mutable_data_ptr(), in, out.numel());
  return out;
}

TEST(Reduce, EqualsATenForEveryDtype) {
  for (DType in : kFloats)
    for (DType reduce : kFloats)
      for (DType out : kFloats)
        for (int64_t ranks : {1, 2, 5})
          for (auto [before, after, factor] :
               {std::tuple(1.0, double(ranks), 1.0),
                {2.0, 1.5, 1.0},
                {1.0, 1.0, 1 / 3.0}}) {
            std::vector<at::Tensor> grads;
            for (int64_t r = 0; r < ranks; ++r)
              // More than a block, and an odd rest.
              grads.push_back(at::randn({5003}).mul(30).to(scalarType(in)));
            GradReduction how{in, reduce, out, before, after, factor};
            EXPECT_TRUE(at::equal(reduced(how, grads), expected(how, grads)))
                << dtypeName(in) << " " << dtypeName(reduce) << " "
                << dtypeName(out) << " " << ranks;
          }
}

// torch.set_flush_denormal reaches the calling thread only, and FSDP2's sums
// are made in threads of the backend's own.
TEST(Reduce, KeepsDenormals) {
  GradReduction how{.postdivide = 2};
  std::vector<at::Tensor> grads(2, at::full({100}, 1.5e-38));
  grads[1] = grads[1].mul(-0.9);
  at::Tensor want = expected(how, grads);
  ASSERT_NE(want[0].item<float>(), 0);
  if (!at::globalContext().setFlushDenormal(true))
    GTEST_SKIP() << "this processor cannot flush denormals";
  at::Tensor got = reduced(how, grads);
  float product = grads[0][0].item<float>() * 0.1f;
  at::globalContext().setFlushDenormal(false);
  EXPECT_TRUE(at::equal(got, want));
  EXPECT_EQ(product, 0) << "the setting itself stays";
}

TEST(Reduce, AddsComplexNumbers) {
  for (DType dtype : {DType::Complex64, DType::Complex128})
    for (int64_t ranks : {1, 2, 4}) {
      GradReduction how{dtype, dtype, dtype, double(ranks > 2 ? 2 : 1),
                        double(ranks > 1 ? 2 : 1)};
      std::vector<at::Tensor> grads;
      for (int64_t rank = 0; rank < ranks; ++rank)
        grads.push_back(at::randn({1003}, scalarType(dtype)));
      EXPECT_TRUE(at::equal(reduced(how, grads), expected(how, grads)));
    }
}

TEST(Reduce, RoundsEverySum) {
  // 256 + 1 is 256 in bf16, so ones added one at a time stay at 256.
  std::vector<at::Tensor> grads(300, at::ones({3}, at::kBFloat16));
  GradReduction how{DType::BFloat16, DType::BFloat16, DType::Float32, 1, 1};
  EXPECT_EQ(reduced(how, grads)[0].item<float>(), 256);
  how.reduce = DType::Float32;
  EXPECT_EQ(reduced(how, grads)[0].item<float>(), 300);
}

TEST(Reduce, DividesBeforeTheSumToStayInRange) {
  std::vector<at::Tensor> grads(4, at::ones({3}, at::kHalf).mul(40000));
  GradReduction how{DType::Float16, DType::Float16, DType::Float32, 2, 2};
  // 4 * 20000 is out of range still, 2 * 20000 is not.
  EXPECT_TRUE(std::isinf(reduced(how, grads)[0].item<float>()));
  grads.resize(2);
  how.postdivide = 1;
  EXPECT_EQ(reduced(how, grads)[0].item<float>(), 40000);
  how = {DType::Float16, DType::Float16, DType::Float32, 1, 2};
  EXPECT_TRUE(std::isinf(reduced(how, grads)[0].item<float>()));
}

/// A rank's rows are cast when they are published; gradients come in the
/// compute dtype and end in the parameter's.
TEST(Reduce, ShmCommCastsOwnRows) {
  for (int64_t ranks : {1, 2, 3}) {
    plan::Plan plan;
    plan.worldSize = ranks;
    plan.units = {{"u", {0, 1}, true}};
    plan.params = {
        {"w", {}, {{7, 3}, DType::Float32}, 0, true, DType::BFloat16},
        {"b", {}, {{5}, DType::Float32}, 0, true, std::nullopt}};
    plan.values = {{{7, 3}, DType::BFloat16},
                   {{5}, DType::Float32},
                   plan::shardSpec(plan, 0, 0),
                   plan::shardSpec(plan, 1, 0)};
    plan::ReduceScatter reduce{0, {0, 1}, {0, 1}, {2, 3}};
    reduce.reduceDtype = DType::Float32;
    plan.instructions.push_back({reduce, plan::Phase::Backward, -1, {}});
    ShmSegment segment(plan);
    auto errors = forkRanks(ranks, [&](int64_t rank) {
      auto check = [](bool condition, const char *what) {
        if (!condition)
          throw std::runtime_error(what);
      };
      ShmComm comm(plan, segment, rank);
      at::Tensor whole = at::arange(21, at::kFloat).add(0.001).reshape({7, 3});
      plan::RowRange rows = plan::shardRows(7, ranks, rank);
      comm.shard(0).copy_(whole.narrow(0, rows.begin, rows.size()));
      comm.shard(1).fill_(1);
      comm.publish();
      comm.beginStep(0);
      std::vector<at::Tensor> full = await(comm.allGather(0));
      check(at::equal(full[0], whole.to(at::kBFloat16)), "gathered");
      check(full[1].scalar_type() == at::kFloat, "not cast");
      check(at::equal(comm.gatherMasters(0)[0], whole), "masters");
      at::Tensor grad = at::ones({7, 3}, at::kBFloat16).mul(double(rank + 1));
      const auto &issued =
          std::get<plan::ReduceScatter>(plan.instructions[0].kind);
      auto shards = await(comm.reduceScatter(issued, {grad, at::ones({5})}));
      comm.beginUpdate();
      check(shards[0].scalar_type() == at::kFloat, "dtype of the shard");
      check(at::equal(shards[0], at::ones({rows.size(), 3})
                                     .mul(double(ranks * (ranks + 1) / 2))
                                     .div(double(ranks))),
            "average");
    });
    for (const std::string &error : errors)
      EXPECT_EQ(error, "") << ranks << " ranks";
  }
}

/// With replicas, both reductions round to the reduction's dtype, and the cast
/// to the parameter's comes last.
TEST(Reduce, ReplicasReduceInReduceDtype) {
  plan::Plan plan = samplePlan(4, false, 2);
  for (plan::Instruction &instruction : plan.instructions)
    if (auto *reduce = std::get_if<plan::ReduceScatter>(&instruction.kind)) {
      reduce->reduceDtype = DType::Float16;
      reduce->divisors = {{2, 1}};
      for (plan::ValueId out : reduce->outs)
        plan.values[out].dtype = DType::Float16;
    } else if (auto *all = std::get_if<plan::AllReduce>(&instruction.kind)) {
      all->postdivide = 2;
    }
  plan::verifyPlan(plan, "plan");
  auto gradOf = [&](int64_t rank, int32_t param) {
    auto values =
        at::arange(plan.params[param].spec.numBytes() / 4, at::kFloat);
    return values.mul(0.37)
        .add(double(rank))
        .reshape(plan.params[param].spec.shape);
  };
  ShmSegment segment(plan);
  auto errors = forkRanks(4, [&](int64_t rank) {
    ShmComm comm(plan, segment, rank);
    comm.publish();
    comm.beginStep(0);
    std::vector<at::Tensor> shards, reduced;
    std::vector<int32_t> params;
    for (const plan::Instruction &instruction : plan.instructions)
      if (auto *reduce = std::get_if<plan::ReduceScatter>(&instruction.kind)) {
        std::vector<at::Tensor> grads;
        for (int32_t param : reduce->params)
          grads.push_back(gradOf(rank, param));
        shards = await(comm.reduceScatter(*reduce, grads));
      } else if (auto *all = std::get_if<plan::AllReduce>(&instruction.kind)) {
        for (const at::Tensor &out : await(comm.allReduce(*all, shards)))
          reduced.push_back(out);
        params.insert(params.end(), all->params.begin(), all->params.end());
      }
    comm.beginUpdate();
    for (size_t i = 0; i < params.size(); ++i) {
      plan::RowRange rows = plan::shardRows(
          plan.params[params[i]].spec.shape[0], 2, comm.shardIndex());
      auto term = [&](int64_t r) {
        return gradOf(r, params[i]).to(at::kHalf).div(2.0);
      };
      at::Tensor whole =
          term(0).add(term(1)).add(term(2).add(term(3))).div(2.0);
      if (reduced[i].scalar_type() != at::kFloat ||
          !at::equal(reduced[i],
                     whole.narrow(0, rows.begin, rows.size()).to(at::kFloat)))
        throw std::runtime_error("expected FSDP2's two reductions");
    }
  });
  for (const std::string &error : errors)
    EXPECT_EQ(error, "");
}

} // namespace
} // namespace fsdp::test
