//===- PlanMutations.h - changes to a plan that verifyPlan must catch -----===//
#ifndef FSDP_UNITTESTS_SUPPORT_PLANMUTATIONS_H
#define FSDP_UNITTESTS_SUPPORT_PLANMUTATIONS_H

#include "Support/SamplePlan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

namespace fsdp::test {

struct Mutation {
  const char *name;
  const char *label;
  std::function<void(plan::Plan &)> apply;
};

/// The instruction of a kind, after `skip` others of it.
template <typename Kind> Kind &first(plan::Plan &plan, int skip = 0) {
  return std::get<Kind>(plan.instructions[find<Kind>(plan, skip)].kind);
}

/// Lets the instruction of a kind run in other microbatches, after `skip`
/// others of it.
template <typename Kind>
void runIn(plan::Plan &plan, int skip, plan::When when) {
  plan.instructions[find<Kind>(plan, skip)].when = when;
}

/// Takes an instruction out of the plan.
inline plan::Instruction take(plan::Plan &plan, size_t at) {
  plan::Instruction instruction = plan.instructions[at];
  plan.instructions.erase(plan.instructions.begin() + long(at));
  return instruction;
}

/// Expects a PlanError that ends with the label.
inline void expectCaught(const plan::Plan &plan, const std::string &label) {
  try {
    verifyPlan(plan, "p.json");
    FAIL() << "not caught";
  } catch (const plan::PlanError &error) {
    EXPECT_THAT(error.what(), testing::StartsWith("p.json: "));
    EXPECT_THAT(error.what(), testing::EndsWith(" (" + label + ")"));
  }
}

} // namespace fsdp::test

#endif // FSDP_UNITTESTS_SUPPORT_PLANMUTATIONS_H
