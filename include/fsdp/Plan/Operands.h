//===- Operands.h - what an instruction reads and defines -----------------===//
#ifndef FSDP_PLAN_OPERANDS_H
#define FSDP_PLAN_OPERANDS_H

#include "fsdp/Plan/Plan.h"

namespace fsdp::plan {

/// Values that the instruction reads, in the order in which it names them; one
/// may be named twice.
std::vector<ValueId> getOperands(const Instruction &instruction);
/// Values that it defines.
std::vector<ValueId> getResults(const Instruction &instruction);

} // namespace fsdp::plan

#endif // FSDP_PLAN_OPERANDS_H
