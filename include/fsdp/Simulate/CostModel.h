//===- CostModel.h - seconds of each instruction of a plan ----------------===//
#ifndef FSDP_SIMULATE_COSTMODEL_H
#define FSDP_SIMULATE_COSTMODEL_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Plan/Profile.h"
#include "fsdp/Simulate/DeviceModel.h"

#include <cstdint>
#include <vector>

namespace fsdp::simulate {

/// How long an instruction takes once, if nothing runs beside it.
struct Cost {
  double seconds = 0;
  /// Of a collective or a copy.
  Medium medium = Medium::None;
};

/// The costs of a step on one rank.
struct StepCost {
  /// In the order of Plan::instructions.
  std::vector<Cost> instructions;
  /// Seconds of a step outside of its instructions; a profile has them.
  double outsideSeconds = 0;
  /// ModelWork of the plan.
  double modelFlops = 0;
  plan::DType flopsDtype = plan::DType::Float32;
  /// Instructions whose time a profile has, and others that run a kernel.
  int64_t measured = 0, modelled = 0;
  /// The profile is of this very instruction list.
  bool samePlan = false;
};

/// Costs of the plan's step on rank `rank`.
///
/// A call takes its FLOPs at the peak of its dtype times a fraction, or its
/// bytes at the memory's bandwidth times a fraction, whichever is longer, and
/// the operator's overhead; views take nothing. Collectives take transferTime
/// of their padded bytes in the dtype that is sent, the optimizer the bytes of
/// its passes over this rank's shards.
///
/// With a profile, costs are what it measured: by position if it is of the same
/// instruction list, otherwise the mean of the instructions with the same
/// signature, or the device's cost if there are none.
StepCost costOf(const plan::Plan &plan, const DeviceModel &device,
                const plan::Profile *profile = nullptr, int64_t rank = 0);

/// Model FLOP/s reached, as a fraction of the device's peak.
double modelFlopsUtilization(const StepCost &cost, const DeviceModel &device,
                             double stepSeconds);

/// Tokens per step on all ranks: elements of the first input that is a matrix
/// of integers, or samples if there is none.
int64_t tokensPerStep(const plan::Plan &plan);

} // namespace fsdp::simulate

#endif // FSDP_SIMULATE_COSTMODEL_H
