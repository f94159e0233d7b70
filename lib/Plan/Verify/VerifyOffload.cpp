//===- VerifyOffload.cpp - copies between host and device -----------------===//
#include "Verifier.h"

namespace fsdp::plan {

void Verifier::useHostShard(ValueId value, int32_t param, const char *label) {
  useShard(value, param, label);
  int32_t unit = plan.params[param].unit;
  if (unit != -1 && plan.units[unit].cpuOffload && !states[value].onHost)
    fail("P21", "the gradient of " + quote(plan.params[param].name) +
                    " is used without a copy_to_host before");
}

void Verifier::visit(const CopyToDevice &copy) {
  const Unit &unit = plan.units[copy.unit];
  if (!unit.cpuOffload || liveGather[copy.unit] != -1 ||
      copiedToDevice[copy.unit])
    fail("P21", "expected a copy_to_device of an offloaded unit that is "
                "neither gathered nor copied, got unit " +
                    quote(unit.name));
  if (optimizerBegun)
    fail("P8", "unit " + quote(unit.name) +
                   " is copied after the optimizer began to write parameters");
  copiedToDevice[copy.unit] = true;
}

void Verifier::visit(const CopyToHost &copy) {
  for (size_t i = 0; i < copy.params.size(); ++i) {
    const Param &param = plan.params[copy.params[i]];
    if (param.unit != copy.unit || !plan.units[copy.unit].cpuOffload)
      fail("P21", "expected a copy_to_host of gradients of one offloaded unit, "
                  "got that of " +
                      quote(param.name));
    useShard(copy.ins[i], copy.params[i], "P21");
    if (states[copy.ins[i]].onHost)
      fail("P21",
           "value " + std::to_string(copy.ins[i]) + " is on the host already");
    defineShard(copy.outs[i], copy.params[i]);
    passSum(copy.ins[i], copy.outs[i]);
    states[copy.outs[i]].onHost = true;
  }
}

} // namespace fsdp::plan
