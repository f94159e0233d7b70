//===- StepGraphs.cpp - a step as graphs of the device --------------------===//
#include "fsdp/Runtime/Execution/StepGraphs.h"
#include "fsdp/Plan/Operands.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Operators/CallTable.h"

#include <algorithm>
#include <utility>

namespace fsdp::runtime {

namespace {

/// Why the host takes part in forward and backward; empty if it does not.
std::string reasonOfBackward(const plan::Plan &plan) {
  std::vector<bool> onHost = plan::computesOnHost(plan);
  for (size_t i = 0; i < onHost.size(); ++i)
    if (onHost[i] && plan.instructions[i].phase != plan::Phase::Optimizer)
      return "gradients of offloaded units are summed on the host";
  return {};
}

/// The same of the optimizer phase.
std::string reasonOfOptimizer(const plan::Plan &plan) {
  const plan::Optimizer &optimizer = plan.optimizer;
  if (std::string reason = reasonOfBackward(plan); !reason.empty())
    return reason;
  std::vector<bool> onHost = plan::computesOnHost(plan);
  if (std::find(onHost.begin(), onHost.end(), true) != onHost.end())
    return "offloaded units are updated on the host";
  if (plan.lrSchedule)
    return "the learning rate changes from step to step";
  if (optimizer.isPlugin())
    return "a plug-in optimizer runs on the host";
  if (optimizer.isExternal())
    return "the host takes the gradients";
  if (!optimizer.fused)
    return "optimizer \"" + optimizer.name +
           "\" without fused computes step by step on the host";
  if (plan.gradScaler && optimizer.name == "sgd" && optimizer.momentum != 0)
    return "the first step that the gradient scaler does not skip sets the "
           "momenta";
  return {};
}

} // namespace

StepGraphs::StepGraphs(const plan::Plan &plan, Device &device)
    : plan(plan), device(device) {
  size_t optimizerBegin = 0, end = plan.instructions.size();
  for (size_t i = 0; i < end; ++i)
    if (plan.instructions[i].phase != plan::Phase::Optimizer)
      optimizerBegin = i + 1;
  std::string backward = reasonOfBackward(plan);
  std::string optimizer = reasonOfOptimizer(plan);
  auto add = [&](std::vector<Segment> &list, size_t from, size_t to,
                 const std::string &reason) {
    Segment &segment = list.emplace_back(Segment{from, to, reason, {}, {}});
    segment.graphs.resize(size_t(plan.accumulationSteps));
    segment.submissions.resize(size_t(plan.accumulationSteps));
  };
  if (plan.accumulationSteps > 1)
    add(inner, 0, optimizerBegin, backward);
  if (backward.empty() && optimizer.empty()) {
    add(last, 0, end, {});
    return;
  }
  add(last, 0, optimizerBegin, backward);
  add(last, optimizerBegin, end, optimizer);
}

std::vector<StepGraphs::Segment *> StepGraphs::segmentsOf(int64_t microbatch) {
  std::vector<Segment *> result;
  bool isLast = microbatch == plan.accumulationSteps - 1;
  for (Segment &segment : isLast ? last : inner)
    result.push_back(&segment);
  return result;
}

bool StepGraphs::isCaptured(int64_t microbatch) const {
  bool isLast = microbatch == plan.accumulationSteps - 1;
  for (const Segment &segment : isLast ? last : inner)
    if (segment.graphs[size_t(microbatch)])
      return true;
  return false;
}

StepGraphs::Outcome StepGraphs::run(Segment &segment, int64_t microbatch,
                                    const std::function<void()> &submit,
                                    const std::function<void()> &restore) {
  std::unique_ptr<DeviceGraph> &graph = segment.graphs[size_t(microbatch)];
  if (graph) {
    graph->replay();
    return Outcome::Replayed;
  }
  int64_t before = segment.submissions[size_t(microbatch)]++;
  if (!segment.reason.empty() || before < kWarmup) {
    submit();
    return Outcome::Submitted;
  }
  try {
    graph = device.capture(submit);
    if (!graph)
      abandon("the device has no graphs");
  } catch (const AbortedError &) {
    throw;
  } catch (const PeerLostError &) {
    throw;
  } catch (const std::exception &error) {
    abandon("it cannot be captured: " + firstLine(error.what()));
    restore();
  }
  if (!graph) {
    submit();
    return Outcome::Submitted;
  }
  graph->replay();
  return Outcome::Captured;
}

void StepGraphs::abandon(const std::string &reason) {
  for (std::vector<Segment> *list : {&inner, &last})
    for (Segment &segment : *list) {
      if (segment.reason.empty())
        segment.reason = reason;
      for (std::unique_ptr<DeviceGraph> &graph : segment.graphs)
        graph.reset();
    }
}

std::string StepGraphs::describe() const {
  std::string text;
  auto add = [&](const char *what, const Segment &segment) {
    text += (text.empty() ? "" : "; ") + std::string(what);
    if (!segment.reason.empty())
      text += " not captured: " + segment.reason;
    else
      text += segment.graphs.back() ? " captured" : " not captured yet";
  };
  if (last.size() == 1) {
    add("whole step", last[0]);
    return text;
  }
  add("forward and backward", last[0]);
  add("optimizer", last[1]);
  return text;
}

} // namespace fsdp::runtime
