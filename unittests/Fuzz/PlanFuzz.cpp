//===- PlanFuzz.cpp - the reader of plans ---------------------------------===//
#include "Fuzz.h"
#include "fsdp/Plan/Memory.h"
#include "fsdp/Plan/Plan.h"

using namespace fsdp;

/// What is accepted is written and read again as the same plan, and can be laid
/// out.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  std::string_view text(reinterpret_cast<const char *>(data), size);
  plan::Plan plan;
  try {
    plan = plan::parsePlan(text, "plan.json");
  } catch (const plan::PlanError &error) {
    fuzz::requireMessage(error.what(), "plan.json: ");
    return 0;
  }
  std::string printed = plan::printPlan(plan);
  fuzz::require(plan::printPlan(plan::parsePlan(printed, "printed")) == printed,
                "expected the same plan when it is read again");
  plan::peakBytes(plan, plan::arenaModel(plan));
  return 0;
}
