//===- VerifyGradients.cpp - what happens to gradients in a plan ----------===//
#include "Verifier.h"

#include <cmath>
#include <string>
#include <utility>

namespace fsdp::plan {

void Verifier::visit(const ReduceScatter &reduce) {
  checkIndex(reduce.unit, plan.units, "a unit");
  checkSize(reduce.ins.size(), reduce.params.size(), "gradients");
  checkSize(reduce.outs.size(), reduce.params.size(), "results");
  if (reduce.reduceDtype && !isFloatingPoint(*reduce.reduceDtype))
    fail("P20", "expected a floating-point reduce_dtype, got " +
                    quoted(dtypeName(*reduce.reduceDtype)));
  if (reduce.divisors)
    for (double divisor :
         {reduce.divisors->predivide, reduce.divisors->postdivide})
      verifyDivisor(divisor);
  for (size_t i = 0; i < reduce.params.size(); ++i) {
    checkIndex(reduce.params[i], plan.params, "a parameter");
    const Param &param = plan.params[reduce.params[i]];
    if (param.unit != reduce.unit)
      fail("P9", "parameter " + quoted(param.name) + " is not of unit " +
                     quoted(plan.units[reduce.unit].name));
    if (!param.requiresGrad)
      fail("P9", "parameter " + quoted(param.name) +
                     " is frozen but its gradient is reduced");
    if (reductionOf[reduce.params[i]] != -1)
      fail("P9", "the gradient of " + quoted(param.name) +
                     " is reduced a second time");
    useOperand(reduce.ins[i]);
    checkSpec(reduce.ins[i], param.gradSpec(), "P5",
              "the gradient of " + quoted(param.name));
    defineShard(reduce.outs[i], reduce.params[i],
                reducedDType(plan, reduce, i));
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
            "the gradient shard of " + quoted(plan.params[param].name));
  states[value].shardOf = param;
}

void Verifier::useShard(ValueId value, int32_t param, const char *label) {
  use(value);
  if (states[value].shardOf != param)
    fail(label, "expected value " + std::to_string(value) +
                    " to be the reduced gradient of " +
                    quoted(plan.params[param].name));
  if (std::exchange(states[value].consumed, true))
    fail("P9", "value " + std::to_string(value) +
                   " is a gradient shard and is used a second time");
}

void Verifier::visit(const Accumulate &accumulate) {
  checkSize(accumulate.ins.size(), accumulate.params.size(), "gradients");
  checkSize(accumulate.outs.size(), accumulate.params.size(), "results");
  for (size_t i = 0; i < accumulate.params.size(); ++i) {
    int32_t param = accumulate.params[i];
    checkIndex(param, plan.params, "a parameter");
    checkIndex(accumulate.ins[i], plan.values, "a value");
    if (!accumulated.insert(param).second)
      fail("P14", "the gradient of " + quoted(plan.params[param].name) +
                      " is accumulated a second time");
    if (states[accumulate.ins[i]].shardOf != -1) {
      useHostShard(accumulate.ins[i], param, "P14");
      defineShard(accumulate.outs[i], param);
      states[accumulate.outs[i]].onHost = true;
      continue;
    }
    use(accumulate.ins[i]);
    define(accumulate.outs[i]);
    for (ValueId value : {accumulate.ins[i], accumulate.outs[i]})
      checkSpec(value, plan.params[param].spec, "P14",
                "the gradient of " + quoted(plan.params[param].name));
  }
}

void Verifier::visit(const ClipGradNorm &clip) {
  checkSize(clip.ins.size(), clip.params.size(), "gradients");
  checkSize(clip.outs.size(), clip.params.size(), "results");
  if (!(clip.maxNorm > 0) || !std::isfinite(clip.maxNorm))
    fail("P15",
         "expected a positive max_norm, got " + std::to_string(clip.maxNorm));
  if (clip.normType != 1 && clip.normType != 2 && clip.normType != INFINITY)
    fail("P15", "expected a norm_type of 1, 2 or inf, got " +
                    std::to_string(clip.normType));
  if (plan.instructions[position].phase != Phase::Optimizer ||
      std::exchange(sawClipping, true))
    fail("P15", "expected one clip_grad_norm, in phase \"optimizer\"");
  for (size_t i = 0; i < clip.params.size(); ++i) {
    checkIndex(clip.params[i], plan.params, "a parameter");
    useHostShard(clip.ins[i], clip.params[i], "P15");
    defineShard(clip.outs[i], clip.params[i]);
    states[clip.outs[i]].onHost = true;
  }
}

void Verifier::visit(const AllReduce &reduce) {
  checkIndex(reduce.unit, plan.units, "a unit");
  checkSize(reduce.ins.size(), reduce.params.size(), "gradients");
  checkSize(reduce.outs.size(), reduce.params.size(), "results");
  if (plan.replicas == 1)
    fail("P16", "gradients are all-reduced but there is one replica");
  if (reduce.postdivide)
    verifyDivisor(*reduce.postdivide);
  for (size_t i = 0; i < reduce.params.size(); ++i) {
    checkIndex(reduce.params[i], plan.params, "a parameter");
    const std::string &name = plan.params[reduce.params[i]].name;
    useShard(reduce.ins[i], reduce.params[i], "P16");
    if (allReduced[reduce.params[i]])
      fail("P16",
           "the gradient of " + quoted(name) + " is all-reduced a second time");
    allReduced[reduce.params[i]] = true;
    defineShard(reduce.outs[i], reduce.params[i]);
  }
}

void Verifier::visit(const OptimizerStep &step) {
  checkSize(step.grads.size(), step.params.size(), "gradients");
  if (!step.groups.empty())
    checkSize(step.groups.size(), step.params.size(), "groups");
  for (int32_t group : step.groups)
    if (group < 0 || group > int32_t(plan.paramGroups.size()))
      fail("P1", "expected a parameter group up to " +
                     std::to_string(plan.paramGroups.size()) + ", got " +
                     std::to_string(group));
  optimizerBegun = true;
  for (size_t u = 0; u < plan.units.size(); ++u)
    if (liveGather[u] != -1)
      fail("P8", "unit " + quoted(plan.units[u].name) +
                     " is still gathered "
                     "where the optimizer writes parameters");
  for (size_t i = 0; i < step.params.size(); ++i) {
    checkIndex(step.params[i], plan.params, "a parameter");
    const Param &param = plan.params[step.params[i]];
    const std::string &name = param.name;
    if (stepped[step.params[i]])
      fail("P8", "parameter " + quoted(name) + " is stepped twice");
    if (param.unit == -1) {
      use(step.grads[i]);
      checkSpec(step.grads[i], param.spec, "P5",
                "the gradient of " + quoted(name));
      if (!param.requiresGrad)
        fail("P8", "parameter " + quoted(name) + " is frozen but is stepped");
    } else {
      if (plan.replicas > 1 && !allReduced[step.params[i]])
        fail("P16", "the gradient of " + quoted(name) +
                        " is not all-reduced over the replicas");
      useHostShard(step.grads[i], step.params[i], "P8");
    }
    if (stepped[step.params[i]])
      fail("P8", "parameter " + quoted(name) + " is stepped twice");
    stepped[step.params[i]] = true;
  }
}

} // namespace fsdp::plan
