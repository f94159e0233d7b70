//===- GradScaler.cpp - torch.amp.GradScaler on gradient shards -----------===//
#include "fsdp/Runtime/Optimizer/GradScaler.h"

#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <map>
#include <utility>

namespace fsdp::runtime {

GradScaler::GradScaler(const plan::GradScaler &settings, c10::Device device)
    : settings(settings) {
  c10::InferenceMode guard;
  currentScale =
      at::full({}, settings.initScale, at::dtype(at::kFloat).device(device));
  growthTracker = at::zeros({}, at::dtype(at::kInt).device(device));
  foundAnywhere = at::zeros({}, at::dtype(at::kFloat).device(device));
}

std::vector<at::Tensor>
GradScaler::unscale(Comm &comm, std::vector<at::Tensor> shards, bool deferred) {
  c10::InferenceMode guard;
  // A lone rank's gradients are taken as they are; two may share storage.
  if (comm.worldSize() == 1)
    for (at::Tensor &shard : shards)
      shard = shard.clone();
  at::Tensor inverse =
      deferred ? at::ones_like(currentScale)
               : currentScale.to(at::kDouble).reciprocal().to(at::kFloat);
  std::map<std::pair<c10::DeviceType, at::ScalarType>, std::vector<at::Tensor>>
      groups;
  for (const at::Tensor &shard : shards)
    if (shard.numel() > 0)
      groups[{shard.device().type(), shard.scalar_type()}].push_back(shard);
  at::Tensor anywhere = at::zeros({1}, currentScale.options());
  for (auto &[kind, alike] : groups) {
    c10::Device where = alike.front().device();
    at::Tensor here = where == anywhere.device()
                          ? anywhere
                          : at::zeros({1}, anywhere.options().device(where));
    at::_amp_foreach_non_finite_check_and_unscale_(alike, here,
                                                   inverse.to(where));
    if (!here.is_same(anywhere))
      anywhere.copy_(at::maximum(anywhere, here.to(anywhere.device())));
  }
  comm.allReduce(anywhere, Reduction::Max);
  foundAnywhere.copy_(anywhere.reshape({}));
  return shards;
}

bool GradScaler::foundInf() const { return foundAnywhere.item<float>() != 0; }

void GradScaler::update() {
  c10::InferenceMode guard;
  at::_amp_update_scale_(currentScale, growthTracker, foundAnywhere,
                         settings.growthFactor, settings.backoffFactor,
                         settings.growthInterval);
  foundAnywhere.zero_();
}

GradScaler::State GradScaler::state() const {
  return {currentScale.item<float>(), growthTracker.item<int32_t>()};
}

void GradScaler::setState(const State &state) {
  c10::InferenceMode guard;
  currentScale.fill_(state.scale);
  growthTracker.fill_(state.growthTracker);
}

} // namespace fsdp::runtime
