//===- Simulator.h - a plan's step in time --------------------------------===//
//
// Plays the streams and events of a plan with given costs. Every rank runs the
// same list with the same costs, and a collective ends on all ranks at once, so
// one rank is played for all: the time to simulate does not grow with their
// number.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_SIMULATE_SIMULATOR_H
#define FSDP_SIMULATE_SIMULATOR_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Plan/TraceFile.h"
#include "fsdp/Simulate/CostModel.h"
#include "fsdp/Simulate/DeviceModel.h"

#include <array>
#include <cstdint>
#include <vector>

namespace fsdp::simulate {

using plan::Span;

/// What the step's time went to, by Stream: of a collective or copy the stream
/// that its kind has, also where it is on the compute stream; of a Wait that
/// takes time itself that of what it waits for.
using StreamSeconds = std::array<double, plan::kNumStreams>;

/// Which of them an instruction's time belongs to, by instruction.
std::vector<plan::Stream> timeKinds(const plan::Plan &plan);

struct Timeline {
  /// In the order in which the host issues them (plan::stepSpans).
  std::vector<Span> spans;
  double seconds = 0; ///< of the step
  StreamSeconds busy = {};
  /// Seconds in which the compute stream had to wait for such a transfer, or
  /// performed it itself.
  StreamSeconds exposed = {};
  /// Of busy compute: what collectives beside it cost.
  double slowdown = 0;

  double exposedCommunication() const;
};

/// Plays a step. Forward and backward run once a microbatch, what runs in the
/// first or last one alone only there, then the optimizer phase.
///
/// An instruction begins when its predecessor on its stream has ended and the
/// events that it waits for are complete: those of the last instructions issued
/// before it that record them; one that was never recorded, or is of an
/// instruction that the microbatch leaves out, is complete. With serialStreams
/// all are on one stream.
///
/// Driven by events, exact for piecewise constant rates: while k collectives
/// are under way over one medium, each goes on at 1/k of its rate; compute goes
/// on at 1/collectiveSlowdown while there is any on another stream.
Timeline simulate(const plan::Plan &plan, const StepCost &cost,
                  const DeviceModel &device);

} // namespace fsdp::simulate

#endif // FSDP_SIMULATE_SIMULATOR_H
