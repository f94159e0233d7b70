//===- VerifyOptimizer.cpp - settings of the update -----------------------===//
#include "Verifier.h"
#include "fsdp/Plan/Limits.h"

#include <cmath>
#include <map>
#include <string>

namespace fsdp::plan {

void Verifier::verifyHyperparameters(const Optimizer &of) const {
  std::map<std::string, double> numbers = of.options;
  numbers.insert({{"lr", of.lr},
                  {"beta1", of.beta1},
                  {"beta2", of.beta2},
                  {"eps", of.eps},
                  {"weight_decay", of.weightDecay},
                  {"momentum", of.momentum},
                  {"dampening", of.dampening}});
  for (const auto &[name, number] : numbers)
    if (!std::isfinite(number))
      fail("P1", "expected a finite number for " + quote(name) +
                     " of the optimizer, got " + std::to_string(number));
}

void Verifier::verifyOptimizer() {
  const std::string &name = plan.optimizer.name;
  if (name != "adam" && name != "adamw" && name != "sgd" && name != "plugin" &&
      name != "external")
    fail("P1", "expected optimizer \"adam\", \"adamw\", \"sgd\", \"plugin\" "
               "or \"external\", got " +
                   quote(name));
  if (plan.optimizer.isPlugin() == plan.optimizer.library.empty())
    fail("P1", "expected a library for optimizer \"plugin\" and for no other");
  for (const Optimizer &group : plan.paramGroups)
    if (group.name != name || group.library != plan.optimizer.library)
      fail("P1", "expected parameter groups of optimizer " + quote(name) +
                     ", got one of " + quote(group.name));
  verifyHyperparameters(plan.optimizer);
  for (const Optimizer &group : plan.paramGroups)
    verifyHyperparameters(group);
  if (plan.accumulationSteps < 1 ||
      plan.accumulationSteps > kMaxAccumulationSteps)
    fail("P1", "expected a number of accumulation steps in [1, " +
                   std::to_string(kMaxAccumulationSteps) + "], got " +
                   std::to_string(plan.accumulationSteps));
  if (!plan.lrSchedule)
    return;
  const LRSchedule &schedule = *plan.lrSchedule;
  if (schedule.decay != "cosine" && schedule.decay != "linear" &&
      schedule.decay != "constant")
    fail("P1", "expected decay \"cosine\", \"linear\" or \"constant\", got " +
                   quote(schedule.decay));
  if (schedule.warmupSteps < 0 || schedule.warmupSteps >= schedule.totalSteps)
    fail("P1", "expected 0 <= warmup_steps < total_steps, got " +
                   std::to_string(schedule.warmupSteps) + " and " +
                   std::to_string(schedule.totalSteps));
  if (!(schedule.minLRRatio >= 0 && schedule.minLRRatio <= 1))
    fail("P1", "expected a min_lr_ratio in [0, 1], got " +
                   std::to_string(schedule.minLRRatio));
}

} // namespace fsdp::plan
