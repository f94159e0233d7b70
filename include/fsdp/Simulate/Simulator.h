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

/// What the step's time went to, by Stream: a collective or copy counts for the
/// stream of its kind, even if it is on the compute stream; a Wait that takes
/// time itself counts for the stream of what it waits for.
using StreamSeconds = std::array<double, plan::kNumStreams>;

/// The stream of an instruction's kind: ownStream, or ModelAxes for a
/// collective that the model makes.
plan::Stream timeKind(const plan::Instruction &instruction);
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
  /// The part of busy compute that is due to collectives beside it.
  double slowdown = 0;

  double exposedCommunication() const;
};

/// Plays a step. Forward and backward run once per microbatch (instructions of
/// only the first or last microbatch run only there), then the optimizer phase.
///
/// An instruction begins when its predecessor on its stream has ended and the
/// events that it waits for are complete: those of the last instructions issued
/// before it that record them. An event that was never recorded, or whose
/// instruction the microbatch leaves out, is complete. With serialStreams, all
/// instructions are on one stream.
///
/// Event-driven, and exact for piecewise constant rates: while k collectives
/// are in flight over one medium, each proceeds at 1/k of its rate; compute
/// proceeds at 1/collectiveSlowdown while there is a collective on another
/// stream.
Timeline simulate(const plan::Plan &plan, const StepCost &cost,
                  const DeviceModel &device);

} // namespace fsdp::simulate

#endif // FSDP_SIMULATE_SIMULATOR_H
