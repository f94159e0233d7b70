//===- VerifyGradients.cpp - what happens to gradients in a plan ----------===//
#include "Verifier.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

namespace fsdp::plan {

void Verifier::visit(const ReduceScatter &reduce) {
  if (reduce.reduceDtype && !isFloatingPoint(*reduce.reduceDtype) &&
      !isComplex(*reduce.reduceDtype))
    fail("P20", "expected a floating-point or complex reduce_dtype, got " +
                    quote(dtypeName(*reduce.reduceDtype)));
  if (reduce.divisors)
    for (double divisor :
         {reduce.divisors->predivide, reduce.divisors->postdivide,
          reduce.divisors->premultiply})
      verifyDivisor(divisor);
  for (size_t i = 0; i < reduce.params.size(); ++i) {
    const Param &param = plan.params[reduce.params[i]];
    if (param.unit != reduce.unit)
      fail("P9", "parameter " + quote(param.name) + " is not of unit " +
                     quote(plan.units[reduce.unit].name));
    if (!param.requiresGrad)
      fail("P9", "parameter " + quote(param.name) +
                     " is frozen but its gradient is reduced");
    if (param.unused)
      fail("P37", "parameter " + quote(param.name) +
                      " is unused but its gradient is reduced");
    if (reductionOf[reduce.params[i]] != -1)
      fail("P9", "the gradient of " + quote(param.name) +
                     " is reduced a second time");
    useOperand(reduce.ins[i]);
    TensorSpec want = param.gradSpec();
    if (states[reduce.ins[i]].summed)
      want.dtype = plan.values[reduce.ins[i]].dtype;
    checkSpec(reduce.ins[i], want, "P5",
              "the gradient of " + quote(param.name));
    DType reduced = reduce.reduceDtype.value_or(want.dtype);
    for (DType other : {reduced, param.spec.dtype})
      if (other != want.dtype && (isComplex(other) || isComplex(want.dtype)))
        fail("P20", "expected the complex gradient of " + quote(param.name) +
                        " to keep its dtype, got " +
                        quote(dtypeName(want.dtype)) + " and " +
                        quote(dtypeName(other)));
    defineShard(reduce.outs[i], reduce.params[i],
                partial.contains(reduce.outs[i]) ? reduced : param.spec.dtype);
    passSum(reduce.ins[i], reduce.outs[i]);
    reductionOf[reduce.params[i]] = reduce.outs[i];
  }
}

void Verifier::verifyDivisor(double divisor) {
  if (!(divisor > 0 && std::isfinite(divisor)))
    fail("P20", "expected positive divisors, got " + std::to_string(divisor));
}

void Verifier::defineShard(ValueId value, int32_t param,
                           std::optional<DType> dtype) {
  define(value);
  TensorSpec spec = shardSpec(plan, param, 0);
  spec.dtype = dtype.value_or(spec.dtype);
  checkSpec(value, spec, "P5",
            "the gradient shard of " + quote(plan.params[param].name));
  states[value].shardOf = param;
}

void Verifier::useShard(ValueId value, int32_t param, const char *label) {
  use(value);
  if (states[value].shardOf != param)
    fail(label, "expected value " + std::to_string(value) +
                    " to be the reduced gradient of " +
                    quote(plan.params[param].name));
  if (std::exchange(states[value].consumed, true))
    fail("P9", "value " + std::to_string(value) +
                   " is a gradient shard and is used a second time");
}

void Verifier::findPartialShards() {
  for (size_t i = plan.instructions.size(); i-- > 0;) {
    const auto &kind = plan.instructions[i].kind;
    if (const auto *reduce = std::get_if<AllReduce>(&kind))
      partial.insert(reduce->ins.begin(), reduce->ins.end());
    else if (const auto *sums = std::get_if<Accumulate>(&kind))
      for (size_t j = 0; j < std::min(sums->ins.size(), sums->outs.size()); ++j)
        if (partial.contains(sums->outs[j]))
          partial.insert(sums->ins[j]);
  }
}

void Verifier::passSum(ValueId in, ValueId out) {
  bool isLast = current->when == When::Last;
  if (states[in].summed != isLast)
    fail("P14", "expected it to run in the last microbatch if and only if "
                "value " +
                    std::to_string(in) +
                    " is a sum over the step's microbatches");
  states[out].summed = isLast;
}

void Verifier::visit(const Accumulate &accumulate) {
  for (size_t i = 0; i < accumulate.params.size(); ++i) {
    int32_t param = accumulate.params[i];
    checkIndex(accumulate.ins[i], plan.values, "a value");
    if (!accumulated.insert(param).second)
      fail("P14", "the gradient of " + quote(plan.params[param].name) +
                      " is accumulated a second time");
    ValueId in = accumulate.ins[i], out = accumulate.outs[i];
    if (states[in].shardOf != -1 && partial.contains(out)) {
      useShard(in, param, "P14");
      defineShard(out, param, plan.values[in].dtype);
    } else if (states[in].shardOf != -1) {
      useHostShard(in, param, "P14");
      defineShard(out, param);
      states[out].onHost = true;
    } else {
      accumulateWhole(in, out, plan.params[param]);
      if (steered.contains(param))
        fail("P10", "a call writes the reduce-scatter input of " +
                        quote(plan.params[param].name) +
                        ", whose whole gradient is accumulated");
    }
    states[out].summed = true;
  }
}

void Verifier::accumulateWhole(ValueId in, ValueId out, const Param &param) {
  use(in);
  define(out);
  TensorSpec want = param.gradSpec();
  checkSpec(in, want, "P14", "the gradient of " + quote(param.name));
  DType dtype = plan.values[out].dtype;
  if (dtype != want.dtype &&
      !(isFloatingPoint(dtype) && isFloatingPoint(want.dtype)))
    fail("P20", "expected the gradient of " + quote(param.name) +
                    " to be added in a floating-point dtype, got " +
                    quote(dtypeName(dtype)));
  want.dtype = dtype;
  checkSpec(out, want, "P14", "the sum of gradients of " + quote(param.name));
}

void Verifier::visit(const LossScale &scale) {
  define(scale.out);
  checkSpec(scale.out, {{}, DType::Float32}, "P22", "the loss scale");
  if (!plan.gradScaler || current->phase != Phase::Backward ||
      std::exchange(sawLossScale, true))
    fail("P22", "expected one loss_scale, in phase \"backward\" of a plan "
                "with grad_scaler");
}

void Verifier::visit(const Unscale &unscale) {
  if (!plan.gradScaler || current->phase != Phase::Optimizer || sawClipping ||
      std::exchange(sawUnscale, true))
    fail("P22", "expected one unscale, in phase \"optimizer\" of a plan with "
                "grad_scaler, before clip_grad_norm");
  if (unscale.deferred && !plan.optimizer.fused)
    fail("P22", "expected a fused optimizer with a deferred unscale");
  for (size_t i = 0; i < unscale.params.size(); ++i) {
    const Param &param = plan.params[unscale.params[i]];
    if (param.spec.dtype == DType::Float16)
      fail("P22",
           "expected no gradient in float16, got that of " + quote(param.name));
    useHostShard(unscale.ins[i], unscale.params[i], "P22");
    defineShard(unscale.outs[i], unscale.params[i]);
    states[unscale.outs[i]].onHost = true;
    states[unscale.outs[i]].summed = states[unscale.ins[i]].summed;
    unscaled.insert(unscale.params[i]);
  }
}

void Verifier::verifyGradScaler() const {
  if (!plan.gradScaler)
    return;
  const GradScaler &s = *plan.gradScaler;
  bool fits = s.initScale > 0 && std::isfinite(s.initScale) &&
              s.growthFactor > 1 && std::isfinite(s.growthFactor) &&
              s.backoffFactor > 0 && s.backoffFactor < 1 &&
              s.growthInterval > 0;
  if (!fits)
    fail("P22", "expected a grad_scaler with init_scale > 0, growth_factor > "
                "1, 0 < backoff_factor < 1 and growth_interval > 0");
}

void Verifier::visit(const ClipGradNorm &clip) {
  if (!(clip.maxNorm > 0) || !std::isfinite(clip.maxNorm))
    fail("P15",
         "expected a positive max_norm, got " + std::to_string(clip.maxNorm));
  if (clip.normType != 1 && clip.normType != 2 && clip.normType != INFINITY)
    fail("P15", "expected a norm_type of 1, 2 or inf, got " +
                    std::to_string(clip.normType));
  if (current->phase != Phase::Optimizer || std::exchange(sawClipping, true))
    fail("P15", "expected one clip_grad_norm, in phase \"optimizer\"");
  for (size_t i = 0; i < clip.params.size(); ++i) {
    useHostShard(clip.ins[i], clip.params[i], "P15");
    defineShard(clip.outs[i], clip.params[i]);
    states[clip.outs[i]].onHost = true;
    states[clip.outs[i]].summed = states[clip.ins[i]].summed;
  }
}

void Verifier::visit(const AllReduce &reduce) {
  if (reduce.postdivide)
    verifyDivisor(*reduce.postdivide);
  for (size_t i = 0; i < reduce.params.size(); ++i) {
    const std::string &name = plan.params[reduce.params[i]].name;
    useShard(reduce.ins[i], reduce.params[i], "P16");
    if (plan.params[reduce.params[i]].unit != reduce.unit)
      fail("P9", "parameter " + quote(name) + " is not of unit " +
                     quote(plan.units[reduce.unit].name));
    if (allReduced[reduce.params[i]])
      fail("P16",
           "the gradient of " + quote(name) + " is all-reduced a second time");
    allReduced[reduce.params[i]] = true;
    if (plan.replicas == 1 && !states[reduce.ins[i]].summed)
      fail("P16", "gradients are all-reduced but there is one replica");
    defineShard(reduce.outs[i], reduce.params[i]);
    passSum(reduce.ins[i], reduce.outs[i]);
  }
}

void Verifier::visit(const OptimizerStep &step) {
  if (!step.groups.empty())
    checkSize(step.groups.size(), step.params.size(), "groups");
  for (int32_t group : step.groups)
    if (group < 0 || group > int32_t(plan.paramGroups.size()))
      fail("P1", "expected a parameter group up to " +
                     std::to_string(plan.paramGroups.size()) + ", got " +
                     std::to_string(group));
  if (std::exchange(optimizerBegun, true))
    fail("P8", "expected one optimizer_step, got a second");
  if (current->phase != Phase::Optimizer)
    fail("P11", "expected optimizer_step in phase \"optimizer\"");
  if (plan.gradScaler && !sawLossScale)
    fail("P22", "expected a loss_scale in a plan with grad_scaler, got none");
  for (size_t u = 0; u < plan.units.size(); ++u)
    if (liveGather[u] != -1)
      fail("P8", "unit " + quote(plan.units[u].name) +
                     " is still gathered "
                     "where the optimizer writes parameters");
  for (size_t i = 0; i < step.params.size(); ++i) {
    const Param &param = plan.params[step.params[i]];
    const std::string &name = param.name;
    if (stepped[step.params[i]])
      fail("P8", "parameter " + quote(name) + " is stepped twice");
    if (param.unused)
      fail("P37", "parameter " + quote(name) + " is unused but is stepped");
    if (plan.gradScaler && !unscaled.contains(step.params[i]))
      fail("P22", "the gradient of " + quote(name) + " is not unscaled");
    if (param.unit == -1) {
      use(step.grads[i]);
      checkSpec(step.grads[i], param.spec, "P5",
                "the gradient of " + quote(name));
      if (!param.requiresGrad)
        fail("P8", "parameter " + quote(name) + " is frozen but is stepped");
    } else {
      if (plan.replicas > 1 && !allReduced[step.params[i]])
        fail("P16", "the gradient of " + quote(name) +
                        " is not all-reduced over the replicas");
      useHostShard(step.grads[i], step.params[i], "P8");
    }
    stepped[step.params[i]] = true;
    if (plan.accumulationSteps > 1 && !states[step.grads[i]].summed)
      fail("P14", "the gradient of " + quote(name) +
                      " is not accumulated over the microbatches");
  }
}

void Verifier::verifyUpdated() const {
  for (size_t p = 0; p < plan.params.size(); ++p) {
    const Param &param = plan.params[p];
    if (param.unused && !param.requiresGrad)
      fail("P37", "parameter " + quote(param.name) +
                      " is unused but requires no gradient");
    if (param.requiresGrad && !param.unused && !stepped[p])
      fail("P37", "parameter " + quote(param.name) +
                      " requires a gradient and is not unused, but no "
                      "optimizer_step updates it");
  }
}

} // namespace fsdp::plan
