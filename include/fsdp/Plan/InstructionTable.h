//===- InstructionTable.h - what a plan's instructions are, for people ----===//
#ifndef FSDP_PLAN_INSTRUCTIONTABLE_H
#define FSDP_PLAN_INSTRUCTIONTABLE_H

#include <string>

namespace fsdp::plan {

/// The table of instructions in docs/plan-format.md: the verb of each kind, its
/// further keys and its meaning, in Markdown.
std::string printInstructionTable();

} // namespace fsdp::plan

#endif // FSDP_PLAN_INSTRUCTIONTABLE_H
