//===- ShardedOptimizer.cpp - torch.optim's updates on shards -------------===//
#include "fsdp/Runtime/ShardedOptimizer.h"
#include "fsdp/Runtime/Error.h"

#include <ATen/core/Tensor.h>
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

ShardedOptimizer::ShardedOptimizer(plan::Optimizer given,
                                   std::vector<at::Tensor> shards)
    : settings(std::move(given)) {
  c10::InferenceMode guard;
  bool adamw = settings.name == "adamw";
  if (!adamw && settings.nesterov &&
      (settings.momentum <= 0 || settings.dampening != 0))
    throw InputError("optimizer \"sgd\": expected a momentum and no dampening "
                     "with nesterov");
  for (size_t i = 0; i < shards.size(); ++i) {
    const at::Tensor &shard = shards[i];
    if (shard.numel() == 0)
      continue;
    auto same = [&](const Group &group) {
      return group.params[0].scalar_type() == shard.scalar_type();
    };
    auto group = std::find_if(groups.begin(), groups.end(), same);
    if (group == groups.end())
      group = groups.emplace(groups.end());
    group->members.push_back(i);
    group->params.push_back(shard);
    if (adamw) {
      group->steps.push_back(at::zeros({}, at::kFloat));
      group->expAvgs.push_back(at::zeros_like(shard));
      group->expAvgSqs.push_back(at::zeros_like(shard));
      if (settings.amsgrad)
        group->maxExpAvgSqs.push_back(at::zeros_like(shard));
    } else if (settings.momentum != 0) {
      group->momenta.push_back(at::empty_like(shard));
    }
  }
}

void ShardedOptimizer::step(const std::vector<at::Tensor> &grads) {
  c10::InferenceMode guard;
  for (Group &group : groups) {
    std::vector<at::Tensor> own;
    for (size_t member : group.members)
      own.push_back(grads[member]);
    if (settings.name == "adamw")
      stepAdamW(group, own);
    else
      stepSGD(group, own);
  }
  firstStep = false;
}

void ShardedOptimizer::stepAdamW(Group &group,
                                 const std::vector<at::Tensor> &grads) {
  for (at::Tensor &step : group.steps)
    step.add_(1);
  if (settings.fused) {
    at::_fused_adamw_(group.params, grads, group.expAvgs, group.expAvgSqs,
                      group.maxExpAvgSqs, group.steps, settings.lr,
                      settings.beta1, settings.beta2, settings.weightDecay,
                      settings.eps, settings.amsgrad, settings.maximize);
    return;
  }
  for (size_t i = 0; i < group.params.size(); ++i) {
    at::Tensor &param = group.params[i];
    at::Tensor grad = settings.maximize ? -grads[i] : grads[i];
    if (settings.weightDecay != 0)
      param.mul_(1 - settings.lr * settings.weightDecay);
    group.expAvgs[i].lerp_(grad, 1 - settings.beta1);
    group.expAvgSqs[i]
        .mul_(settings.beta2)
        .addcmul_(grad, grad, 1 - settings.beta2);
    auto step = double(group.steps[i].item<float>());
    double correction1 = 1 - std::pow(settings.beta1, step);
    double correction2 = 1 - std::pow(settings.beta2, step);
    // Python's `x ** 0.5` is pow, not sqrt.
    double correction2Root = std::pow(correction2, 0.5);
    at::Tensor square = group.expAvgSqs[i];
    if (settings.amsgrad) {
      square = group.maxExpAvgSqs[i];
      at::maximum_out(square, square, group.expAvgSqs[i]);
    }
    at::Tensor denominator =
        square.sqrt().div(correction2Root).add_(settings.eps);
    param.addcdiv_(group.expAvgs[i], denominator, -(settings.lr / correction1));
  }
}

void ShardedOptimizer::stepSGD(Group &group,
                               const std::vector<at::Tensor> &grads) {
  if (settings.fused) {
    at::_fused_sgd_(group.params, grads, group.momenta, settings.weightDecay,
                    settings.momentum, settings.lr, settings.dampening,
                    settings.nesterov, settings.maximize,
                    firstStep && settings.momentum != 0);
    return;
  }
  for (size_t i = 0; i < group.params.size(); ++i) {
    at::Tensor &param = group.params[i];
    at::Tensor grad = settings.maximize ? -grads[i] : grads[i];
    if (settings.weightDecay != 0)
      grad = grad.add(param, settings.weightDecay);
    if (settings.momentum != 0) {
      at::Tensor &momentum = group.momenta[i];
      if (firstStep)
        momentum.copy_(grad);
      else
        momentum.mul_(settings.momentum).add_(grad, 1 - settings.dampening);
      grad =
          settings.nesterov ? grad.add(momentum, settings.momentum) : momentum;
    }
    param.add_(grad, -settings.lr);
  }
}

} // namespace fsdp::runtime
