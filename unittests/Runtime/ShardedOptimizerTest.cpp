//===- ShardedOptimizerTest.cpp - updates against formulas and each other -===//
#include "fsdp/Runtime/Optimizer/ShardedOptimizer.h"
#include "fsdp/Runtime/Error.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <cmath>

namespace fsdp::test {
namespace {

using runtime::ShardedOptimizer;

struct Case {
  const char *name;
  plan::Optimizer settings;
};

plan::Optimizer settings(const char *name, double weightDecay,
                         double momentum = 0) {
  plan::Optimizer o;
  o.name = name;
  o.lr = 0.01;
  o.weightDecay = weightDecay;
  o.momentum = momentum;
  return o;
}

std::vector<plan::Optimizer> allSettings() {
  std::vector<plan::Optimizer> all = {
      settings("adam", 0),      settings("adam", 0.1), settings("adamw", 0),
      settings("adamw", 0.1),   settings("sgd", 0),    settings("sgd", 0.1),
      settings("sgd", 0.1, 0.9)};
  plan::Optimizer o = settings("adamw", 0.1);
  o.amsgrad = true;
  all.push_back(o);
  o = settings("adamw", 0.1);
  o.maximize = true;
  all.push_back(o);
  o = settings("sgd", 0.1, 0.9);
  o.nesterov = true;
  all.push_back(o);
  o = settings("sgd", 0.1, 0.9);
  o.dampening = 0.5;
  o.maximize = true;
  all.push_back(o);
  return all;
}

/// The textbook update of one number, in double.
class Reference {
public:
  Reference(const plan::Optimizer &o, double value) : o(o), value(value) {}

  double step(double grad) {
    ++count;
    grad = o.maximize ? -grad : grad;
    if (o.name != "sgd") {
      if (o.name == "adamw")
        value -= o.lr * o.weightDecay * value;
      else
        grad += o.weightDecay * value;
      m = o.beta1 * m + (1 - o.beta1) * grad;
      v = o.beta2 * v + (1 - o.beta2) * grad * grad;
      vMax = std::max(vMax, v);
      double mHat = m / (1 - std::pow(o.beta1, count));
      double vHat = (o.amsgrad ? vMax : v) / (1 - std::pow(o.beta2, count));
      value -= o.lr * mHat / (std::sqrt(vHat) + o.eps);
      return value;
    }
    grad += o.weightDecay * value;
    if (o.momentum != 0) {
      m = count == 1 ? grad : o.momentum * m + (1 - o.dampening) * grad;
      grad = o.nesterov ? grad + o.momentum * m : m;
    }
    return value -= o.lr * grad;
  }

private:
  plan::Optimizer o;
  double value, m = 0, v = 0, vMax = 0;
  int count = 0;
};

std::string describeSettings(const plan::Optimizer &o) {
  return o.name + " wd " + std::to_string(o.weightDecay) + " momentum " +
         std::to_string(o.momentum) + (o.fused ? " fused" : "") +
         (o.nesterov ? " nesterov" : "") + (o.amsgrad ? " amsgrad" : "") +
         (o.maximize ? " maximize" : "");
}

TEST(ShardedOptimizer, FollowsTheFormula) {
  for (plan::Optimizer o : allSettings())
    for (bool fused : {false, true}) {
      o.fused = fused;
      SCOPED_TRACE(describeSettings(o));
      at::Generator generator = at::detail::createCPUGenerator(3);
      at::Tensor param = at::randn({5, 7}, generator, at::kDouble);
      at::Tensor empty = at::empty({0, 7}, at::kDouble);
      std::vector<Reference> references;
      for (int64_t i = 0; i < param.numel(); ++i)
        references.emplace_back(o, param.view({-1})[i].item<double>());
      ShardedOptimizer optimizer({o}, {}, {empty, param});
      for (int step = 0; step < 5; ++step) {
        at::Tensor grad = at::randn({5, 7}, generator, at::kDouble);
        optimizer.step({empty, grad});
        for (int64_t i = 0; i < param.numel(); ++i)
          ASSERT_NEAR(
              param.view({-1})[i].item<double>(),
              references[size_t(i)].step(grad.view({-1})[i].item<double>()),
              1e-12);
      }
    }
}

TEST(ShardedOptimizer, ShardsUpdateLikeTheWhole) {
  // Element-wise updates: rows updated apart equal rows updated together.
  for (plan::Optimizer o : allSettings()) {
    SCOPED_TRACE(describeSettings(o));
    at::Generator generator = at::detail::createCPUGenerator(4);
    at::Tensor whole = at::randn({6, 16}, generator, at::kFloat);
    at::Tensor parts = whole.clone();
    ShardedOptimizer one({o}, {}, {whole});
    ShardedOptimizer two({o}, {},
                         {parts.narrow(0, 0, 4), parts.narrow(0, 4, 2)});
    for (int step = 0; step < 3; ++step) {
      at::Tensor grad = at::randn({6, 16}, generator, at::kFloat);
      one.step({grad});
      two.step({grad.narrow(0, 0, 4).clone(), grad.narrow(0, 4, 2).clone()});
    }
    EXPECT_TRUE(whole.equal(parts));
  }
}

/// The path of GPUs does the same operations in the same order; in half
/// precision foreach's kernels round numbers first.
TEST(ShardedOptimizer, PathsHaveTheSameBitsOnTheCpu) {
  using Path = ShardedOptimizer::Path;
  for (at::ScalarType dtype : {at::kFloat, at::kDouble})
    for (const plan::Optimizer &o : allSettings()) {
      SCOPED_TRACE(describeSettings(o));
      at::Generator generator = at::detail::createCPUGenerator(6);
      std::vector<at::Tensor> one, other;
      for (int64_t rows : {6, 0, 3, 1}) {
        one.push_back(at::randn({rows, 16}, generator, at::kFloat).to(dtype));
        other.push_back(one.back().clone());
      }
      ShardedOptimizer single({o}, {}, one, Path::SingleTensor);
      ShardedOptimizer foreach ({o}, {}, other, Path::Foreach);
      for (int step = 0; step < 4; ++step) {
        std::vector<at::Tensor> grads, untouched;
        for (const at::Tensor &param : one) {
          grads.push_back(
              at::randn(param.sizes(), generator, at::kFloat).to(dtype));
          untouched.push_back(grads.back().clone());
        }
        single.step(grads);
        foreach
          .step(grads);
        for (size_t i = 0; i < grads.size(); ++i) {
          EXPECT_TRUE(grads[i].equal(untouched[i]));
          EXPECT_TRUE(one[i].equal(other[i]));
        }
      }
      for (size_t i = 0; i < one.size(); ++i)
        for (size_t k = 0; k < single.state(i).size(); ++k)
          EXPECT_TRUE(
              single.state(i)[k].second.equal(foreach.state(i)[k].second));
    }
}

TEST(ShardedOptimizer, TakesThePathOfTorch) {
  using Path = ShardedOptimizer::Path;
  c10::Device cpu(at::kCPU), gpu(at::kCUDA, 1);
  EXPECT_EQ(ShardedOptimizer::defaultPath({cpu, cpu}), Path::SingleTensor);
  EXPECT_EQ(ShardedOptimizer::defaultPath({gpu, gpu}), Path::Foreach);
  // One that is offloaded, and torch.optim takes all tensor by tensor.
  EXPECT_EQ(ShardedOptimizer::defaultPath({gpu, cpu}), Path::SingleTensor);
}

TEST(ShardedOptimizer, FusedKernelsSkipWhatIsNotFinite) {
  c10::InferenceMode guard;
  for (plan::Optimizer o : allSettings()) {
    o.fused = true;
    SCOPED_TRACE(describeSettings(o));
    at::Tensor param = at::ones({3}), expected = at::ones({3});
    ShardedOptimizer optimizer({o}, {}, {param}), plain({o}, {}, {expected});
    EXPECT_TRUE(optimizer.isFused());
    at::Tensor finite = at::zeros({}), infinite = at::ones({});
    for (int step = 0; step < 6; ++step) {
      bool skips = step % 2 == 0;
      at::Tensor grad = at::ones({3}).mul_(step - 1.5);
      auto state = optimizer.state(0);
      std::vector<at::Tensor> before;
      for (auto &[name, tensor] : state)
        before.push_back(tensor.clone());
      int64_t steps = optimizer.steps();
      ShardedOptimizer::Scaling scaling;
      scaling.foundInf = skips ? infinite : finite;
      optimizer.step({grad}, 1, scaling);
      if (skips) {
        optimizer.setSteps(steps);
        for (size_t i = 0; i < state.size(); ++i)
          EXPECT_TRUE(state[i].second.equal(before[i])) << state[i].first;
      } else {
        plain.step({grad});
      }
      EXPECT_TRUE(param.equal(expected));
    }
  }
}

TEST(ShardedOptimizer, GroupsHaveTheirOwnSettings) {
  plan::Optimizer own = settings("sgd", 0), other = settings("sgd", 0.5);
  other.lr = 0.25;
  at::Tensor first = at::ones({2}), second = at::ones({2});
  ShardedOptimizer optimizer({own, other}, {1, 0}, {first, second});
  optimizer.step({at::ones({2}), at::ones({2})}, /*lrFactor=*/0.5);
  EXPECT_FLOAT_EQ(first[0].item<float>(), 1 - 0.125f * 1.5f);
  EXPECT_FLOAT_EQ(second[0].item<float>(), 1 - 0.005f);
}

TEST(ShardedOptimizer, TakesNewSettings) {
  plan::Optimizer own = settings("sgd", 0), other = settings("sgd", 0);
  at::Tensor first = at::ones({2}), second = at::ones({2});
  ShardedOptimizer optimizer({own, other}, {1, 0}, {first, second});
  own.lr = 0.25;
  other.lr = 0.5;
  other.weightDecay = 0.5;
  optimizer.setSettings({own, other});
  EXPECT_EQ(optimizer.currentSettings(), (std::vector{own, other}));
  optimizer.step({at::ones({2}), at::ones({2})});
  EXPECT_FLOAT_EQ(first[0].item<float>(), 1 - 0.5f * 1.5f);
  EXPECT_FLOAT_EQ(second[0].item<float>(), 0.75f);
}

TEST(ShardedOptimizer, RefusesSettingsWithAnotherState) {
  plan::Optimizer own = settings("adamw", 0);
  ShardedOptimizer optimizer({own}, {}, {at::ones({2})});
  plan::Optimizer amsgrad = own, fused = own, kind = own, momentum = own;
  amsgrad.amsgrad = !own.amsgrad;
  fused.fused = !own.fused;
  kind.name = "adam";
  momentum.momentum = 0.5;
  for (const auto &changed : std::vector<std::vector<plan::Optimizer>>{
           {}, {own, own}, {amsgrad}, {fused}, {kind}, {momentum}})
    EXPECT_THROW(optimizer.setSettings(changed), runtime::InputError);
  EXPECT_EQ(optimizer.currentSettings(), std::vector{own});
}

TEST(ShardedOptimizer, GoesOnFromItsState) {
  c10::InferenceMode guard;
  for (const plan::Optimizer &o : allSettings()) {
    at::Tensor one = at::ones({3}), other = at::ones({3});
    at::Tensor none = at::ones({0});
    ShardedOptimizer first({o}, {}, {none, one});
    auto grad = [](int step) { return at::ones({3}).mul_(step - 1.5); };
    for (int step = 0; step < 3; ++step)
      first.step({none, grad(step)});
    ShardedOptimizer second({o}, {}, {none, other});
    other.copy_(one);
    auto saved = first.state(1), loaded = second.state(1);
    ASSERT_EQ(saved.size(), loaded.size());
    for (size_t i = 0; i < saved.size(); ++i) {
      EXPECT_EQ(saved[i].first, loaded[i].first);
      loaded[i].second.copy_(saved[i].second);
    }
    second.setSteps(first.steps());
    EXPECT_EQ(second.steps(), 3);
    for (int step = 3; step < 5; ++step) {
      first.step({none, grad(step)});
      second.step({none, grad(step)});
    }
    EXPECT_TRUE(one.equal(other)) << o.name;
    // An empty shard has the names, its own shape and the number of steps.
    auto empty = second.state(0);
    ASSERT_EQ(empty.size(), saved.size());
    for (size_t i = 0; i < saved.size(); ++i) {
      EXPECT_EQ(empty[i].first, saved[i].first);
      if (empty[i].first == "step")
        EXPECT_EQ(empty[i].second.item<float>(), 5);
      else
        EXPECT_EQ(empty[i].second.numel(), 0);
    }
  }
}

TEST(ShardedOptimizer, UpdatesTheStateThatItIsGiven) {
  c10::InferenceMode guard;
  for (const plan::Optimizer &o : allSettings()) {
    at::Tensor one = at::ones({3}), other = at::ones({3});
    ShardedOptimizer first({o}, {}, {one});
    ShardedOptimizer second({o}, {}, {other});
    first.step({at::ones({3})});
    other.copy_(one);
    ShardedOptimizer::NamedTensors given;
    for (const auto &[name, tensor] : first.state(0))
      given.emplace_back(name, tensor.clone());
    second.bindState(0, given);
    second.setSteps(1);
    first.step({at::ones({3})});
    second.step({at::ones({3})});
    EXPECT_TRUE(one.equal(other)) << o.name;
    ShardedOptimizer::NamedTensors own = first.state(0);
    for (size_t i = 0; i < given.size(); ++i)
      EXPECT_TRUE(given[i].second.equal(own[i].second)) << given[i].first;
    if (given.empty())
      continue;
    given.back().second = at::ones({2});
    EXPECT_THROW(second.bindState(0, given), runtime::InputError);
    given.pop_back();
    if (!given.empty()) {
      EXPECT_THROW(second.bindState(0, given), runtime::InputError);
    }
  }
}

TEST(ShardedOptimizer, BeginsWithoutState) {
  c10::InferenceMode guard;
  for (const plan::Optimizer &o : allSettings()) {
    at::Tensor one = at::ones({3});
    ShardedOptimizer used({o}, {}, {one});
    used.step({at::ones({3})});
    at::Tensor other = one.clone();
    ShardedOptimizer fresh({o}, {}, {other});
    // As torch.optim's state that has been removed: the next is a first update.
    used.bindState(0, ShardedOptimizer::NamedTensors());
    for (const auto &[name, tensor] : used.state(0))
      EXPECT_EQ(tensor.abs().sum().item<double>(), 0) << o.name << name;
    if (o.name != "sgd")
      continue; // the others' corrections count the updates of all
    used.step({at::ones({3}).mul(2)});
    fresh.step({at::ones({3}).mul(2)});
    EXPECT_TRUE(one.equal(other)) << o.name;
  }
}

TEST(ShardedOptimizer, RefusesNesterovWithoutMomentum) {
  plan::Optimizer o = settings("sgd", 0);
  o.nesterov = true;
  EXPECT_THROW(ShardedOptimizer({o}, {}, {}), runtime::InputError);
}

} // namespace
} // namespace fsdp::test
