//===- Operands.h - what an instruction reads, defines and occupies -------===//
#ifndef FSDP_PLAN_OPERANDS_H
#define FSDP_PLAN_OPERANDS_H

#include "fsdp/Plan/Plan.h"

#include <vector>

namespace fsdp::plan {

/// Values that the instruction reads, in the order in which it names them; one
/// may be named twice.
std::vector<ValueId> getOperands(const Instruction &instruction);
std::vector<ValueId> getOperands(const Call &call);
/// Operands that it writes in place.
std::vector<ValueId> getMutated(const Instruction &instruction);
/// Values that it defines, its buffer among them.
std::vector<ValueId> getResults(const Instruction &instruction);

/// Its first key in the JSON form, "all_gather" and so on.
std::string_view verbOf(const Instruction &instruction);

/// The operator of a call, or else the verb and the unit, such as "all_gather
/// layers.0".
std::string titleOf(const Plan &plan, const Instruction &instruction);

/// The stream that collectives and copies of its kind run on when they run
/// beside computation; Stream::Compute for kinds that only run there.
Stream ownStream(const Instruction &instruction);

/// Per instruction of the step: whether it computes on the host, with the
/// gradients of offloaded units that a CopyToHost brought there.
std::vector<bool> computesOnHost(const Plan &plan);

/// Whether an instruction runs in a microbatch of the step, counted from 0; an
/// instruction of the optimizer phase runs with the last.
bool runsIn(const Plan &plan, const Instruction &instruction,
            int64_t microbatch);
/// How often it runs in a step.
int64_t runsPerStep(const Plan &plan, const Instruction &instruction);

} // namespace fsdp::plan

#endif // FSDP_PLAN_OPERANDS_H
