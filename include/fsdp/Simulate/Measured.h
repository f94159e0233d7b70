//===- Measured.h - a measured step beside the planned one ----------------===//
#ifndef FSDP_SIMULATE_MEASURED_H
#define FSDP_SIMULATE_MEASURED_H

#include "fsdp/Plan/TraceFile.h"
#include "fsdp/Simulate/Simulator.h"

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::simulate {

/// Where the seconds of a step went; they add up to the step.
struct Breakdown {
  /// Time in which the compute stream computes, by Phase.
  std::array<double, 3> compute = {};
  /// Time in which it does not compute, and a transfer of this kind is in
  /// flight; of several, the first in the order of Stream. The time of a Wait
  /// belongs to what it waits for.
  StreamSeconds exposed = {};
  double outside = 0; ///< no instruction is in flight
};
/// The breakdown of spans within `seconds`.
Breakdown breakDown(const plan::Plan &plan, const std::vector<Span> &spans,
                    double seconds);

/// Instructions that compute the same, in one step.
struct Difference {
  std::string what; ///< plan::signature
  int64_t runs = 0;
  double planned = 0, measured = 0; ///< seconds of all runs
};
/// Of the instructions that compute and have a signature, the `most` whose time
/// differs most, the largest difference first. Both lists are the spans of a
/// step of the plan, in the same order.
std::vector<Difference> largestDifferences(const plan::Plan &plan,
                                           const std::vector<Span> &planned,
                                           const std::vector<Span> &measured,
                                           size_t most);

} // namespace fsdp::simulate

#endif // FSDP_SIMULATE_MEASURED_H
