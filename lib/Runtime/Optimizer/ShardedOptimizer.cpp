//===- ShardedOptimizer.cpp - torch.optim's updates on shards -------------===//
#include "fsdp/Runtime/Optimizer/ShardedOptimizer.h"
#include "fsdp/Runtime/Error.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_maximum.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_neg.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/_foreach_sub.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <tuple>

namespace fsdp::runtime {

/// A number as Python's operators pass it: mul_ of a Scalar would round it to
/// the tensor's dtype first.
static at::Tensor number(double value) {
  return at::native::wrapped_scalar_tensor(value);
}

ShardedOptimizer::ShardedOptimizer(const std::vector<plan::Optimizer> &given,
                                   const std::vector<int32_t> &groupOf,
                                   const std::vector<at::Tensor> &shards,
                                   std::optional<Path> path)
    : settings(given), shards(shards), groupOf(groupOf) {
  c10::InferenceMode guard;
  for (const plan::Optimizer &o : settings)
    if (o.name == "sgd" && o.nesterov && (o.momentum <= 0 || o.dampening != 0))
      throw InputError("optimizer \"sgd\": expected a momentum and no "
                       "dampening with nesterov");
  if (settings[0].isPlugin())
    library.emplace(settings[0].library);
  auto settingsOf = [&](size_t shard) {
    return groupOf.empty() ? 0 : size_t(groupOf[shard]);
  };
  std::vector<std::vector<c10::Device>> places(settings.size());
  for (size_t i = 0; i < shards.size(); ++i)
    places[settingsOf(i)].push_back(shards[i].device());
  for (size_t i = 0; i < shards.size(); ++i) {
    const at::Tensor &shard = shards[i];
    if (shard.numel() == 0)
      continue;
    size_t index = settingsOf(i);
    auto same = [&](const Group &group) {
      return group.settings == index &&
             group.params[0].options().type_equal(shard.options());
    };
    auto group = std::find_if(groups.begin(), groups.end(), same);
    if (group == groups.end()) {
      group = groups.emplace(groups.end());
      group->settings = index;
      group->path = path.value_or(
          settings[index].foreach ? Path::Foreach : defaultPath(places[index]));
      group->plugin = createPlugin(index);
    }
    group->members.push_back(i);
    group->params.push_back(shard);
    addState(*group, shard);
  }
}

ShardedOptimizer::Path
ShardedOptimizer::defaultPath(const std::vector<c10::Device> &places) {
  bool isGpu = std::all_of(places.begin(), places.end(),
                           [](c10::Device place) { return place.is_cuda(); });
  return isGpu ? Path::Foreach : Path::SingleTensor;
}

bool ShardedOptimizer::isFused() const {
  return std::all_of(settings.begin(), settings.end(),
                     [](const plan::Optimizer &o) { return o.fused; });
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
    if (o.momentum != 0) {
      group.momenta.push_back(at::zeros_like(shard));
      group.momentumBegins.push_back(0);
    }
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
                            double lrFactor, const Scaling &scaling) {
  c10::InferenceMode guard;
  for (Group &group : groups) {
    std::vector<at::Tensor> own;
    for (size_t member : group.members)
      own.push_back(grads[member]);
    const plan::Optimizer &o = settings[group.settings];
    double lr = o.lr * lrFactor;
    Scaling here = scaling;
    for (std::optional<at::Tensor> *scalar : {&here.gradScale, &here.foundInf})
      if (*scalar)
        *scalar = (*scalar)->to(group.params[0].device());
    if (group.plugin)
      stepPlugin(group, own, lr);
    else if (o.name == "sgd")
      stepSGD(group, own, lr, here);
    else
      stepAdam(group, own, lr, here);
  }
  ++stepsDone;
}

void ShardedOptimizer::setSettings(
    const std::vector<plan::Optimizer> &changed) {
  if (changed.size() != settings.size())
    throw InputError(
        "expected the settings of " + std::to_string(settings.size()) +
        " parameter groups, got " + std::to_string(changed.size()));
  auto layout = [](const plan::Optimizer &o) {
    return std::tie(o.name, o.amsgrad, o.fused, o.foreach, o.library,
                    o.options);
  };
  for (size_t i = 0; i < changed.size(); ++i)
    if (layout(changed[i]) != layout(settings[i]) ||
        (changed[i].momentum != 0) != (settings[i].momentum != 0))
      throw InputError("group " + std::to_string(i) +
                       " of the optimizer: expected settings that keep its "
                       "state");
  settings = changed;
}

std::vector<std::pair<std::string, at::Tensor *>>
ShardedOptimizer::stateOf(Group &group, size_t member) {
  std::vector<std::pair<std::string, at::Tensor *>> result;
  auto add = [&](const char *name, std::vector<at::Tensor> &tensors) {
    if (!tensors.empty())
      result.emplace_back(name, &tensors[member]);
  };
  add("step", group.steps);
  add("exp_avg", group.expAvgs);
  add("exp_avg_sq", group.expAvgSqs);
  add("max_exp_avg_sq", group.maxExpAvgSqs);
  add("momentum_buffer", group.momenta);
  if (group.plugin)
    for (at::Tensor &tensor : group.pluginStates[member])
      result.emplace_back("state" + std::to_string(result.size()), &tensor);
  return result;
}

std::pair<ShardedOptimizer::Group *, size_t>
ShardedOptimizer::find(size_t shard) {
  for (Group &group : groups) {
    auto member = std::find(group.members.begin(), group.members.end(), shard);
    if (member != group.members.end())
      return {&group, size_t(member - group.members.begin())};
  }
  return {nullptr, 0};
}

ShardedOptimizer::NamedTensors ShardedOptimizer::state(size_t shard) {
  c10::InferenceMode guard;
  auto [group, member] = find(shard);
  Group empty;
  if (!group) {
    group = &empty;
    empty.settings = groupOf.empty() ? 0 : size_t(groupOf[shard]);
    empty.plugin = createPlugin(empty.settings);
    addState(empty, shards[shard]);
    for (at::Tensor &step : empty.steps)
      step.fill_(stepsDone);
  }
  NamedTensors result;
  for (const auto &[name, tensor] : stateOf(*group, member))
    result.emplace_back(name, *tensor);
  return result;
}

void ShardedOptimizer::bindState(size_t shard, const NamedTensors &tensors) {
  auto [group, member] = find(shard);
  if (!group)
    return;
  std::vector<std::pair<std::string, at::Tensor *>> own =
      stateOf(*group, member);
  if (!group->momenta.empty())
    group->momentumBegins[member] = tensors.empty() ? stepsDone : 0;
  if (tensors.empty()) {
    // The tensors until now may be someone else's.
    for (const auto &[name, tensor] : own)
      *tensor = at::zeros_like(*tensor);
    return;
  }
  if (own.size() != tensors.size())
    throw InputError("expected " + std::to_string(own.size()) +
                     " tensors of an optimizer's state, got " +
                     std::to_string(tensors.size()));
  for (size_t i = 0; i < own.size(); ++i) {
    const auto &[name, tensor] = tensors[i];
    const at::Tensor &before = *own[i].second;
    if (name != own[i].first || tensor.sizes() != before.sizes() ||
        !tensor.is_contiguous() ||
        tensor.scalar_type() != before.scalar_type() ||
        tensor.device() != before.device())
      throw InputError("state of an optimizer: expected \"" + own[i].first +
                       "\" of " + before.toString() + c10::str(before.sizes()) +
                       ", got \"" + name + "\" of " + tensor.toString() +
                       c10::str(tensor.sizes()));
  }
  for (size_t i = 0; i < own.size(); ++i)
    *own[i].second = tensors[i].second;
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
                                const Scaling &scaling) {
  const plan::Optimizer &o = settings[group.settings];
  bool decoupled = o.name == "adamw";
  at::_foreach_add_(group.steps, 1);
  if (o.fused) {
    auto update = [&](auto kernel) {
      kernel(group.params, grads, group.expAvgs, group.expAvgSqs,
             group.maxExpAvgSqs, group.steps, lr, o.beta1, o.beta2,
             o.weightDecay, o.eps, o.amsgrad, o.maximize, scaling.gradScale,
             scaling.foundInf);
    };
    if (decoupled)
      update([](auto &&...args) { at::_fused_adamw_(args...); });
    else
      update([](auto &&...args) { at::_fused_adam_(args...); });
    if (scaling.foundInf)
      at::_foreach_sub_(
          group.steps,
          std::vector<at::Tensor>(group.steps.size(), *scaling.foundInf));
    return;
  }
  if (group.path == Path::Foreach)
    return stepAdamForeach(group, grads, lr);
  for (size_t i = 0; i < group.params.size(); ++i) {
    at::Tensor &param = group.params[i];
    at::Tensor grad = o.maximize ? -grads[i] : grads[i];
    if (o.weightDecay != 0 && decoupled)
      param.mul_(number(1 - lr * o.weightDecay));
    else if (o.weightDecay != 0)
      grad = grad.add(param, o.weightDecay);
    // torch.optim's Adam treats a complex number as two real ones.
    auto asReal = [](const at::Tensor &tensor) {
      return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
    };
    grad = asReal(grad);
    at::Tensor average = asReal(group.expAvgs[i]);
    at::Tensor square = asReal(group.expAvgSqs[i]);
    average.lerp_(grad, 1 - o.beta1);
    square.mul_(number(o.beta2)).addcmul_(grad, grad, 1 - o.beta2);
    auto step = double(group.steps[i].item<float>());
    double correction1 = 1 - std::pow(o.beta1, step);
    double correction2 = 1 - std::pow(o.beta2, step);
    // Python's `x ** 0.5` is pow, not sqrt.
    double correction2Root = std::pow(correction2, 0.5);
    if (o.amsgrad) {
      at::Tensor largest = asReal(group.maxExpAvgSqs[i]);
      at::maximum_out(largest, largest, square);
      square = largest;
    }
    at::Tensor denominator =
        square.sqrt().div(number(correction2Root)).add_(number(o.eps));
    asReal(param).addcdiv_(average, denominator, -(lr / correction1));
  }
}

void ShardedOptimizer::stepAdamForeach(Group &group,
                                       std::vector<at::Tensor> grads,
                                       double lr) {
  const plan::Optimizer &o = settings[group.settings];
  if (o.maximize)
    grads = at::_foreach_neg(grads);
  if (o.weightDecay != 0 && o.name == "adamw")
    at::_foreach_mul_(group.params, 1 - lr * o.weightDecay);
  else if (o.weightDecay != 0 && o.maximize)
    at::_foreach_add_(grads, group.params, o.weightDecay);
  else if (o.weightDecay != 0)
    grads = at::_foreach_add(grads, group.params, o.weightDecay);
  at::_foreach_lerp_(group.expAvgs, grads, 1 - o.beta1);
  at::_foreach_mul_(group.expAvgSqs, o.beta2);
  at::_foreach_addcmul_(group.expAvgSqs, grads, grads, 1 - o.beta2);
  grads.clear();
  std::vector<at::Scalar> stepSizes, correction2Roots;
  for (const at::Tensor &count : group.steps) {
    auto step = double(count.item<float>());
    stepSizes.emplace_back(-(lr / (1 - std::pow(o.beta1, step))));
    // Python's `x ** 0.5` is pow, not sqrt.
    correction2Roots.emplace_back(std::pow(1 - std::pow(o.beta2, step), 0.5));
  }
  if (o.amsgrad)
    at::_foreach_maximum_(group.maxExpAvgSqs, group.expAvgSqs);
  std::vector<at::Tensor> denominators =
      at::_foreach_sqrt(o.amsgrad ? group.maxExpAvgSqs : group.expAvgSqs);
  at::_foreach_div_(denominators, correction2Roots);
  at::_foreach_add_(denominators, o.eps);
  at::_foreach_addcdiv_(group.params, group.expAvgs, denominators, stepSizes);
}

bool ShardedOptimizer::begins(const Group &group, size_t member) const {
  return stepsDone == 0 || group.momentumBegins[member] == stepsDone;
}

bool ShardedOptimizer::allBegin(const Group &group) const {
  size_t count = 0;
  for (size_t i = 0; i < group.momenta.size(); ++i)
    count += begins(group, i);
  if (count != 0 && count != group.momenta.size())
    throw InputError("optimizer \"sgd\": expected momentum buffers of all "
                     "parameters of a group or of none with fused");
  return count != 0;
}

void ShardedOptimizer::updateMomentum(Group &group, size_t member,
                                      const at::Tensor &grad) const {
  const plan::Optimizer &o = settings[group.settings];
  at::Tensor &momentum = group.momenta[member];
  if (begins(group, member))
    momentum.copy_(grad);
  else
    momentum.mul_(number(o.momentum)).add_(grad, 1 - o.dampening);
}

void ShardedOptimizer::stepSGD(Group &group,
                               const std::vector<at::Tensor> &grads, double lr,
                               const Scaling &scaling) {
  const plan::Optimizer &o = settings[group.settings];
  if (o.fused) {
    at::_fused_sgd_(group.params, grads, group.momenta, o.weightDecay,
                    o.momentum, lr, o.dampening, o.nesterov, o.maximize,
                    allBegin(group), scaling.gradScale, scaling.foundInf);
    return;
  }
  if (group.path == Path::Foreach)
    return stepSGDForeach(group, grads, lr);
  for (size_t i = 0; i < group.params.size(); ++i) {
    at::Tensor &param = group.params[i];
    at::Tensor grad = o.maximize ? -grads[i] : grads[i];
    if (o.weightDecay != 0)
      grad = grad.add(param, o.weightDecay);
    if (o.momentum != 0) {
      const at::Tensor &momentum = group.momenta[i];
      updateMomentum(group, i, grad);
      grad = o.nesterov ? grad.add(momentum, o.momentum) : momentum;
    }
    param.add_(grad, -lr);
  }
}

void ShardedOptimizer::stepSGDForeach(Group &group,
                                      std::vector<at::Tensor> grads,
                                      double lr) {
  const plan::Optimizer &o = settings[group.settings];
  // Given gradients may share storage with others.
  bool isOwn = false;
  auto add = [&](const std::vector<at::Tensor> &terms, double factor) {
    if (isOwn)
      at::_foreach_add_(grads, terms, factor);
    else
      grads = at::_foreach_add(grads, terms, factor);
    isOwn = true;
  };
  if (o.maximize) {
    grads = at::_foreach_neg(grads);
    isOwn = true;
  }
  if (o.weightDecay != 0)
    add(group.params, o.weightDecay);
  if (o.momentum != 0) {
    bool anyBegins = false;
    for (size_t i = 0; i < grads.size(); ++i)
      anyBegins |= begins(group, i);
    if (anyBegins) {
      for (size_t i = 0; i < grads.size(); ++i)
        updateMomentum(group, i, grads[i]);
    } else {
      at::_foreach_mul_(group.momenta, o.momentum);
      at::_foreach_add_(group.momenta, grads, 1 - o.dampening);
    }
    if (o.nesterov)
      add(group.momenta, o.momentum);
    else
      grads = group.momenta;
  }
  at::_foreach_add_(group.params, grads, -lr);
}

} // namespace fsdp::runtime
