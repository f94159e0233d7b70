//===- StepGraphs.h - a step as graphs of the device ----------------------===//
//
// Captures the steady step of a plan and replays it, one graph for each
// microbatch: the same kernels and collectives on the same memory in the same
// order, so the same bits, with next to no work of the host. What a graph
// cannot hold, because the host decides it anew in each step, is a segment of
// its own that is submitted as ever, with the reason.
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
  /// measured in one step, placed for the next, and communicators set up by
  /// then.
  static constexpr int64_t kWarmup = 3;

  /// Borrows plan and device.
  StepGraphs(const plan::Plan &plan, Device &device);

  /// Instructions of a step that are captured, or not, together.
  struct Segment {
    size_t begin = 0, end = 0;
    /// Why it is submitted in every step; empty where it is captured.
    std::string reason;
    /// By microbatch: how often it was submitted, and once captured, its graph.
    std::vector<int64_t> submissions;
    std::vector<std::unique_ptr<DeviceGraph>> graphs;
  };
  enum class Outcome : uint8_t { Submitted, Captured, Replayed };

  /// Those of a microbatch, in order.
  std::vector<Segment *> segmentsOf(int64_t microbatch);

  /// Whether a microbatch has a graph.
  bool isCaptured(int64_t microbatch) const;

  /// Executes a segment, which `submit` submits and joins: by its graph, where
  /// there is one or can be. Captured: `submit` was called and its work
  /// replayed; Replayed: it was not. Where a capture fails, all segments go on
  /// without, their reason says so, and `submit` is called again, after
  /// `restore`, which brings the host's state back to before.
  Outcome run(Segment &segment, int64_t microbatch,
              const std::function<void()> &submit,
              const std::function<void()> &restore);

  /// For people: what is captured and what is not, and why. After kWarmup
  /// steps and one.
  std::string describe() const;

  /// Gives up all graphs.
  void abandon(const std::string &reason);

private:
  const plan::Plan &plan;
  Device &device;
  /// Of every microbatch but the last, and of the last.
  std::vector<Segment> inner, last;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_EXECUTION_STEPGRAPHS_H
