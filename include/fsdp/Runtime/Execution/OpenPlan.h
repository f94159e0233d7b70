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

/// Throws InputError where the plan of the file `path` was captured for another
/// device than "cpu", or "cuda" for `onGpu`. A plan that does not say runs on
/// any.
void checkDevice(const plan::Plan &plan, const std::string &path, bool onGpu);

/// The same for the architecture of a GPU, Device::architecture().
void checkArchitecture(const plan::Plan &plan, const std::string &path,
                       const std::string &got);

/// What a run is to be warned of: a line on the plan's other version of
/// PyTorch, or empty.
std::string otherTorch(const plan::Plan &plan, const std::string &path);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_EXECUTION_OPENPLAN_H
