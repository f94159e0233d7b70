//===- ShardedOptimizer.cpp - torch.optim's updates on shards -------------===//
#include "fsdp/Runtime/ShardedOptimizer.h"
#include "fsdp/Runtime/Error.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>

namespace fsdp::runtime {

ShardedOptimizer::ShardedOptimizer(const std::vector<plan::Optimizer> &given,
                                   const std::vector<int32_t> &groupOf,
                                   const std::vector<at::Tensor> &shards)
    : settings(given), shards(shards), groupOf(groupOf) {
  c10::InferenceMode guard;
  for (const plan::Optimizer &o : settings)
    if (o.name == "sgd" && o.nesterov && (o.momentum <= 0 || o.dampening != 0))
      throw InputError("optimizer \"sgd\": expected a momentum and no "
                       "dampening with nesterov");
  if (settings[0].name == "plugin")
    library.emplace(settings[0].library);
  for (size_t i = 0; i < shards.size(); ++i) {
    const at::Tensor &shard = shards[i];
    if (shard.numel() == 0)
      continue;
    size_t index = groupOf.empty() ? 0 : size_t(groupOf[i]);
    auto same = [&](const Group &group) {
      return group.settings == index &&
             group.params[0].options().type_equal(shard.options());
    };
    auto group = std::find_if(groups.begin(), groups.end(), same);
    if (group == groups.end()) {
      group = groups.emplace(groups.end());
      group->settings = index;
      group->plugin = createPlugin(index);
    }
    group->members.push_back(i);
    group->params.push_back(shard);
    addState(*group, shard);
  }
}

std::unique_ptr<OptimizerPlugin>
ShardedOptimizer::createPlugin(size_t index) const {
  return library ? library->create(settings[index].options) : nullptr;
}

void ShardedOptimizer::addState(Group &group, const at::Tensor &shard) const {
  const plan::Optimizer &o = settings[group.settings];
  if (group.plugin) {
    std::vector<at::Tensor> &states = group.pluginStates.emplace_back();
    for (size_t n = group.plugin->numStates(); n > 0; --n)
      states.push_back(at::zeros_like(shard));
  } else if (o.name == "sgd") {
    if (o.momentum != 0)
      group.momenta.push_back(at::zeros_like(shard));
  } else {
    // As torch.optim keeps it: beside what a fused kernel updates.
    group.steps.push_back(at::zeros(
        {}, at::dtype(at::kFloat)
                .device(o.fused ? shard.device() : c10::Device(at::kCPU))));
    group.expAvgs.push_back(at::zeros_like(shard));
    group.expAvgSqs.push_back(at::zeros_like(shard));
    if (o.amsgrad)
      group.maxExpAvgSqs.push_back(at::zeros_like(shard));
  }
}

void ShardedOptimizer::step(const std::vector<at::Tensor> &grads,
                            double lrFactor,
                            const std::optional<at::Tensor> &gradScale) {
  c10::InferenceMode guard;
  for (Group &group : groups) {
    std::vector<at::Tensor> own;
    for (size_t member : group.members)
      own.push_back(grads[member]);
    const plan::Optimizer &o = settings[group.settings];
    double lr = o.lr * lrFactor;
    if (group.plugin)
      stepPlugin(group, own, lr);
    else if (o.name == "sgd")
      stepSGD(group, own, lr, gradScale);
    else
      stepAdam(group, own, lr, gradScale);
  }
  ++stepsDone;
}

std::vector<double> ShardedOptimizer::learningRates() const {
  std::vector<double> rates;
  for (const plan::Optimizer &o : settings)
    rates.push_back(o.lr);
  return rates;
}

void ShardedOptimizer::setLearningRates(const std::vector<double> &rates) {
  if (rates.size() != settings.size())
    throw InputError("expected " + std::to_string(settings.size()) +
                     " learning rates, got " + std::to_string(rates.size()));
  for (size_t i = 0; i < rates.size(); ++i)
    settings[i].lr = rates[i];
}

ShardedOptimizer::NamedTensors ShardedOptimizer::state(size_t shard) const {
  c10::InferenceMode guard;
  Group empty;
  const Group *group = &empty;
  size_t index = 0;
  for (const Group &candidate : groups) {
    auto member =
        std::find(candidate.members.begin(), candidate.members.end(), shard);
    if (member == candidate.members.end())
      continue;
    group = &candidate;
    index = size_t(member - candidate.members.begin());
  }
  if (group == &empty) {
    empty.settings = groupOf.empty() ? 0 : size_t(groupOf[shard]);
    empty.plugin = createPlugin(empty.settings);
    addState(empty, shards[shard]);
    for (at::Tensor &step : empty.steps)
      step.fill_(stepsDone);
  }
  NamedTensors result;
  auto add = [&](const char *name, const std::vector<at::Tensor> &tensors) {
    if (!tensors.empty())
      result.emplace_back(name, tensors[index]);
  };
  add("step", group->steps);
  add("exp_avg", group->expAvgs);
  add("exp_avg_sq", group->expAvgSqs);
  add("max_exp_avg_sq", group->maxExpAvgSqs);
  add("momentum_buffer", group->momenta);
  if (group->plugin)
    for (const at::Tensor &tensor : group->pluginStates[index])
      result.emplace_back("state" + std::to_string(result.size()), tensor);
  return result;
}

void ShardedOptimizer::stepPlugin(Group &group,
                                  const std::vector<at::Tensor> &grads,
                                  double lr) {
  for (size_t i = 0; i < group.params.size(); ++i)
    group.plugin->update(group.params[i], grads[i], group.pluginStates[i],
                         stepsDone + 1, lr);
}

void ShardedOptimizer::stepAdam(Group &group,
                                const std::vector<at::Tensor> &grads, double lr,
                                const std::optional<at::Tensor> &gradScale) {
  const plan::Optimizer &o = settings[group.settings];
  bool decoupled = o.name == "adamw";
  for (at::Tensor &step : group.steps)
    step.add_(1);
  if (o.fused) {
    auto update = [&](auto kernel) {
      kernel(group.params, grads, group.expAvgs, group.expAvgSqs,
             group.maxExpAvgSqs, group.steps, lr, o.beta1, o.beta2,
             o.weightDecay, o.eps, o.amsgrad, o.maximize, gradScale);
    };
    if (decoupled)
      update([](auto &&...args) { at::_fused_adamw_(args...); });
    else
      update([](auto &&...args) { at::_fused_adam_(args...); });
    return;
  }
  for (size_t i = 0; i < group.params.size(); ++i) {
    at::Tensor &param = group.params[i];
    at::Tensor grad = o.maximize ? -grads[i] : grads[i];
    if (o.weightDecay != 0 && decoupled)
      param.mul_(1 - lr * o.weightDecay);
    else if (o.weightDecay != 0)
      grad = grad.add(param, o.weightDecay);
    group.expAvgs[i].lerp_(grad, 1 - o.beta1);
    group.expAvgSqs[i].mul_(o.beta2).addcmul_(grad, grad, 1 - o.beta2);
    auto step = double(group.steps[i].item<float>());
    double correction1 = 1 - std::pow(o.beta1, step);
    double correction2 = 1 - std::pow(o.beta2, step);
    // Python's `x ** 0.5` is pow, not sqrt.
    double correction2Root = std::pow(correction2, 0.5);
    at::Tensor square = group.expAvgSqs[i];
    if (o.amsgrad) {
      square = group.maxExpAvgSqs[i];
      at::maximum_out(square, square, group.expAvgSqs[i]);
    }
    at::Tensor denominator = square.sqrt().div(correction2Root).add_(o.eps);
    param.addcdiv_(group.expAvgs[i], denominator, -(lr / correction1));
  }
}

void ShardedOptimizer::stepSGD(Group &group,
                               const std::vector<at::Tensor> &grads, double lr,
                               const std::optional<at::Tensor> &gradScale) {
  const plan::Optimizer &o = settings[group.settings];
  bool firstStep = stepsDone == 0;
  if (o.fused) {
    at::_fused_sgd_(group.params, grads, group.momenta, o.weightDecay,
                    o.momentum, lr, o.dampening, o.nesterov, o.maximize,
                    firstStep && o.momentum != 0, gradScale);
    return;
  }
  for (size_t i = 0; i < group.params.size(); ++i) {
    at::Tensor &param = group.params[i];
    at::Tensor grad = o.maximize ? -grads[i] : grads[i];
    if (o.weightDecay != 0)
      grad = grad.add(param, o.weightDecay);
    if (o.momentum != 0) {
      at::Tensor &momentum = group.momenta[i];
      if (firstStep)
        momentum.copy_(grad);
      else
        momentum.mul_(o.momentum).add_(grad, 1 - o.dampening);
      grad = o.nesterov ? grad.add(momentum, o.momentum) : momentum;
    }
    param.add_(grad, -lr);
  }
}

} // namespace fsdp::runtime
