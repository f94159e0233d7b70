//===- OpenPlan.h - a plan that may run -----------------------------------===//
#ifndef FSDP_RUNTIME_EXECUTION_OPENPLAN_H
#define FSDP_RUNTIME_EXECUTION_OPENPLAN_H

#include "fsdp/Plan/Plan.h"

#include <string>

namespace fsdp::runtime {

/// Reads and verifies a plan, and makes sure that to run it is to compute: its
/// operators are such that a plan may call them (Operators.h), and the library
/// of a plug-in optimizer is the file that `allowedPlugin` names, whatever
/// links lead to it, and a plug-in of this version. Nothing of the plan or the
/// library has run afterwards. The plan's path of the library is then absolute
/// and without links. Throws InputError or plan::PlanError.
plan::Plan openPlan(const std::string &path, const std::string &allowedPlugin);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_EXECUTION_OPENPLAN_H
