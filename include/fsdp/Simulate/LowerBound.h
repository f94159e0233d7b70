//===- LowerBound.h - the least time of a plan's instructions -------------===//
#ifndef FSDP_SIMULATE_LOWERBOUND_H
#define FSDP_SIMULATE_LOWERBOUND_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Simulate/CostModel.h"
#include "fsdp/Simulate/DeviceModel.h"

#include <string>

namespace fsdp::simulate {

struct LowerBound {
  double seconds = 0;
  /// What takes this time: "compute" ("compute and collectives of the model",
  /// if there are any), the transfers of a stream ("all_gather"), the links
  /// ("collectives between hosts"), or "one thread".
  std::string of;
};

/// A time that no order and no overlap of the instructions of a plan's step,
/// each with its cost, can beat: the longest of compute alone, in which the
/// model's own collectives run, the transfers of each kind, and all collectives
/// over each link; with serialStreams, the sum
/// of all. Dependencies, and how much a collective slows down compute beside
/// it, are left out, so a step may be unable to reach the bound.
LowerBound lowerBound(const plan::Plan &plan, const StepCost &cost,
                      const DeviceModel &device);

/// "2.1 % above the least time of its instructions, 5.000 ms of compute".
std::string describeGap(const LowerBound &bound, double stepSeconds);

} // namespace fsdp::simulate

#endif // FSDP_SIMULATE_LOWERBOUND_H
