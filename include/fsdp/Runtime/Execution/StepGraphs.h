//===- StepGraphs.h - a step as graphs of the device ----------------------===//
//
// Captures the steady step of a plan and replays it, one graph for each
// microbatch: the same kernels and collectives on the same memory in the same
// order, so the same bits, with next to no work for the host. What a graph
// cannot hold, because the host decides it anew in each step, is a separate
// segment that is submitted as usual; the segment records the reason.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_EXECUTION_STEPGRAPHS_H
#define FSDP_RUNTIME_EXECUTION_STEPGRAPHS_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Devices/Device.h"

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::runtime {

class StepGraphs {
public:
  /// How often a segment is submitted before it is captured: allocations are
  /// measured in one step and placed for the next, and communicators are set up
  /// by then.
  static constexpr int64_t kWarmup = 3;

  /// Borrows plan and device.
  StepGraphs(const plan::Plan &plan, Device &device);

  /// Instructions of a step that are either all captured together, or all not
  /// captured.
  struct Segment {
    size_t begin = 0, end = 0;
    /// Why it is submitted in every step; empty where it is captured.
    std::string reason;
    /// By microbatch: how often it was submitted, and once captured, its graph.
    std::vector<int64_t> submissions;
    std::vector<std::unique_ptr<DeviceGraph>> graphs;
  };
  enum class Outcome : uint8_t { Submitted, Captured, Replayed };

  /// The segments of a microbatch, in order.
  std::vector<Segment *> segmentsOf(int64_t microbatch);

  /// Whether a microbatch has a graph.
  bool isCaptured(int64_t microbatch) const;

  /// Executes a segment, which `submit` submits and joins, by its graph if
  /// there is one or one can be captured. Captured: `submit` was called and its
  /// work replayed; Replayed: `submit` was not called. If a capture fails, all
  /// segments continue without graphs, and their reason says so; `submit` is
  /// called again after `restore`, which resets the host's state to what it was
  /// before.
  Outcome run(Segment &segment, int64_t microbatch,
              const std::function<void()> &submit,
              const std::function<void()> &restore);

  /// A text for people: what is captured, what is not and why, and what is not
  /// captured yet.
  std::string describe() const;

  /// Gives up all graphs.
  void abandon(const std::string &reason);

private:
  const plan::Plan &plan;
  Device &device;
  /// The segments of every microbatch but the last, and those of the last.
  std::vector<Segment> inner, last;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_EXECUTION_STEPGRAPHS_H
