//===- OpenPlan.h - a plan that may run -----------------------------------===//
#ifndef FSDP_RUNTIME_EXECUTION_OPENPLAN_H
#define FSDP_RUNTIME_EXECUTION_OPENPLAN_H

#include "fsdp/Plan/Plan.h"

#include <string>

namespace fsdp::runtime {

/// Reads and verifies a plan, and makes sure that running it does nothing but
/// compute: its operators are ones that a plan may call (Operators.h), and the
/// library of a plug-in optimizer is the file that `allowedPlugin` names,
/// whatever links lead to it, and a plug-in of this version. No code of the
/// plan or the library is run. Afterwards the plan's path of the library is
/// absolute and has no links. Throws InputError or plan::PlanError.
plan::Plan openPlan(const std::string &path, const std::string &allowedPlugin);

/// Throws InputError if the plan in the file `path` was captured for a device
/// other than "cpu", or "cuda" for `onGpu`. A plan that names no device runs on
/// any.
void checkDevice(const plan::Plan &plan, const std::string &path, bool onGpu);

/// The same for the architecture of a GPU, Device::architecture().
void checkArchitecture(const plan::Plan &plan, const std::string &path,
                       const std::string &got);

/// A one-line warning if the plan was made with another version of PyTorch;
/// empty otherwise.
std::string otherTorch(const plan::Plan &plan, const std::string &path);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_EXECUTION_OPENPLAN_H
