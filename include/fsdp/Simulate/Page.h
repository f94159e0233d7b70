//===- Page.h - a simulated step as a page for people ---------------------===//
#ifndef FSDP_SIMULATE_PAGE_H
#define FSDP_SIMULATE_PAGE_H

#include "fsdp/Plan/Memory.h"
#include "fsdp/Plan/Plan.h"
#include "fsdp/Simulate/CostModel.h"
#include "fsdp/Simulate/DeviceModel.h"
#include "fsdp/Simulate/Simulator.h"

#include <string>

namespace fsdp::simulate {

/// Self-contained HTML: rank 0's memory over the step, what every stream does,
/// the units, and for each collective what it waits for and what waits for it.
/// The plan has an arena.
std::string printPage(const plan::Plan &plan, const Cluster &cluster,
                      const StepCost &cost, const Timeline &timeline,
                      plan::MemoryModel model);

} // namespace fsdp::simulate

#endif // FSDP_SIMULATE_PAGE_H
