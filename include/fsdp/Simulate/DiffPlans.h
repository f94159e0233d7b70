//===- DiffPlans.h - what changed from one plan to another ----------------===//
#ifndef FSDP_SIMULATE_DIFFPLANS_H
#define FSDP_SIMULATE_DIFFPLANS_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Simulate/DeviceModel.h"

#include <string>

namespace fsdp::simulate {

/// A table of what differs in schedule, memory and traffic, and, with a device,
/// in simulated time; "no difference" for plans that are equal. Rows of units
/// and gathers whose names differ only in their numbers, and whose values are
/// the same, are merged into one. Below a collective that moved, the table says
/// why each plan has it where it is, if the reasons differ.
std::string printDifference(const plan::Plan &a, const plan::Plan &b,
                            const DeviceModel *device);

} // namespace fsdp::simulate

#endif // FSDP_SIMULATE_DIFFPLANS_H
