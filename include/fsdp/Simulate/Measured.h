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
  /// The compute stream computes, by Phase.
  std::array<double, 3> compute = {};
  /// It does not, and a transfer of this kind is under way; of several the
  /// first in the order of Stream. A Wait's time is that of what it waits for.
  StreamSeconds exposed = {};
  double outside = 0; ///< no instruction is under way
};
/// Of spans within `seconds`.
Breakdown breakDown(const plan::Plan &plan, const std::vector<Span> &spans,
                    double seconds);

/// Instructions that compute the same, in one step.
struct Difference {
  std::string what; ///< plan::signature
  int64_t runs = 0;
  double planned = 0, measured = 0; ///< seconds of all runs
};
/// Of what computes and has a signature, the `most` whose time differs most,
/// the largest first. Both are the spans of a step of the plan, in one order.
std::vector<Difference> largestDifferences(const plan::Plan &plan,
                                           const std::vector<Span> &planned,
                                           const std::vector<Span> &measured,
                                           size_t most);

} // namespace fsdp::simulate

#endif // FSDP_SIMULATE_MEASURED_H
