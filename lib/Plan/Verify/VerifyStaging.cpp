//===- VerifyStaging.cpp - copies of state for a checkpoint ---------------===//
//
// What a checkpoint holds is complete, and of one step: P39. That the copies
// end before the update begins is a matter of streams (VerifyStreams.cpp).
//
//===----------------------------------------------------------------------===//
#include "Verifier.h"

namespace fsdp::plan {

void Verifier::visit(const StageState &stage) {
  const std::string &name = plan.units[stage.unit].name;
  if (optimizerBegun)
    fail("P39", "unit " + quote(name) +
                    " is staged after the optimizer began to write parameters");
  if (!staged.insert(stage.unit).second)
    fail("P39", "unit " + quote(name) + " is staged twice");
}

void Verifier::verifyStaged() const {
  if (staged.empty())
    return;
  for (size_t p = 0; p < plan.params.size(); ++p)
    if (int32_t unit = plan.params[p].unit;
        unit != -1 && stepped[p] && !staged.contains(unit))
      fail("P39", "unit " + quote(plan.units[size_t(unit)].name) +
                      " is updated but not staged, as others are");
}

} // namespace fsdp::plan
