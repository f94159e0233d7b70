//===- StepGraphs.h - a step as graphs of the device ----------------------===//
//
// Captures the steady step of a plan and replays it, one graph for each
// microbatch: the same kernels and collectives on the same memory in the same
// order, so the same bits, with next to no work of the host. What a graph
// cannot hold, because the host decides it anew in each step, is a segment of
// its own that is submitted as ever, with the reason.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_STEPGRAPHS_H
#define FSDP_RUNTIME_STEPGRAPHS_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Device.h"

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::runtime {

class StepGraphs {
public:
  /// Steps before the first capture: allocations are measured in one, placed
  /// for the next, and communicators set up by then.
  static constexpr int64_t kWarmup = 3;

  /// Borrows plan and device.
  StepGraphs(const plan::Plan &plan, Device &device);

  /// Instructions of a step that are captured, or not, together.
  struct Segment {
    size_t begin = 0, end = 0;
    /// Why it is submitted in every step; empty where it is captured.
    std::string reason;
    /// By microbatch, once captured.
    std::vector<std::unique_ptr<DeviceGraph>> graphs;
  };

  /// Those of a microbatch, in order.
  std::vector<Segment *> segmentsOf(int64_t microbatch);

  /// Executes a segment, of step `step` from 0, which `submit` submits and
  /// joins: by its graph, where there is one or can be. Where a capture fails
  /// the segment goes on without, and its reason says so.
  void run(Segment &segment, int64_t step, int64_t microbatch,
           const std::function<void()> &submit);

  /// For people: what is captured and what is not, and why. After the first
  /// captured step.
  std::string describe() const;

private:
  const plan::Plan &plan;
  Device &device;
  /// Of every microbatch but the last, and of the last.
  std::vector<Segment> inner, last;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_STEPGRAPHS_H
