//===- Simulator.cpp - a plan's step in time ------------------------------===//
#include "fsdp/Simulate/Simulator.h"

#include "fsdp/Plan/ModelCollectives.h"
#include "fsdp/Plan/Operands.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>
#include <numeric>
#include <type_traits>

namespace fsdp::simulate {

using namespace plan;

namespace {

/// Instructions of a step, each as often as it runs: the time of each is kept.
/// Its nanoseconds are integers in traces.
constexpr double kMaxSeconds = 1e9;
constexpr int64_t kMaxRuns = int64_t(1) << 24;

class Player {
public:
  Player(const Plan &plan, const StepCost &cost, const DeviceModel &device)
      : plan(plan), cost(cost), device(device) {}

  Timeline run() {
    issueStep();
    while (startReady())
      advance();
    result.seconds = now + cost.outsideSeconds;
    account();
    return std::move(result);
  }

private:
  struct Queue {
    std::vector<int> spans; ///< in order
    size_t next = 0;        ///< the first that has not ended
    bool running = false;
    double left = 0; ///< seconds of it, at full rate
  };

  //===--------------------------------------------------------------------===//
  // Issue
  //===--------------------------------------------------------------------===//

  void issueStep() {
    EventId events = 0;
    for (const Instruction &instruction : plan.instructions) {
      events = std::max(events, instruction.records + 1);
      for (EventId event : instruction.waits)
        events = std::max(events, event + 1);
    }
    recorders.assign(size_t(events), -1);
    for (int64_t m = 0; m < plan.accumulationSteps; ++m)
      issue(m);
    ended.assign(result.spans.size(), false);
  }

  void issue(int64_t microbatch) {
    for (size_t i = 0; i < plan.instructions.size(); ++i) {
      const Instruction &instruction = plan.instructions[i];
      bool runs = runsIn(plan, instruction, microbatch);
      int span = runs ? int(result.spans.size()) : -1;
      if (runs) {
        result.spans.push_back({int32_t(i), int32_t(microbatch)});
        size_t stream = device.serialStreams ? 0 : size_t(instruction.stream);
        queues[stream].spans.push_back(span);
        awaited.emplace_back();
        for (EventId event : instruction.waits)
          if (recorders[event] >= 0)
            awaited.back().push_back(recorders[event]);
      }
      if (instruction.records >= 0)
        recorders[instruction.records] = span;
    }
  }

  //===--------------------------------------------------------------------===//
  // Time
  //===--------------------------------------------------------------------===//

  const Cost &costOfSpan(int span) const {
    return cost.instructions[result.spans[span].instruction];
  }

  /// Begins whatever can begin; what takes no time ends at once. False when
  /// nothing is in flight any more.
  bool startReady() {
    for (bool changed = true; changed;) {
      changed = false;
      for (Queue &queue : queues) {
        while (!queue.running && queue.next < queue.spans.size()) {
          int span = queue.spans[queue.next];
          if (!std::all_of(awaited[span].begin(), awaited[span].end(),
                           [&](int other) { return ended[other]; }))
            break;
          result.spans[span].begin = now;
          queue.left = costOfSpan(span).seconds;
          queue.running = true;
          changed = true;
          if (queue.left <= 0)
            end(queue);
        }
      }
    }
    return std::any_of(queues.begin(), queues.end(),
                       [](const Queue &queue) { return queue.running; });
  }

  void end(Queue &queue) {
    int span = queue.spans[queue.next++];
    result.spans[span].end = now;
    ended[span] = true;
    queue.running = false;
  }

  static bool isCollective(Medium medium) {
    return medium == Medium::WithinHost || medium == Medium::BetweenHosts;
  }

  /// Advances to the end of whatever ends next.
  void advance() {
    int users[4] = {}, collectives = 0;
    for (const Queue &queue : queues)
      if (queue.running) {
        Medium medium = costOfSpan(queue.spans[queue.next]).medium;
        ++users[size_t(medium)];
        collectives += isCollective(medium);
      }
    std::array<double, kNumStreams> rates = {};
    double step = std::numeric_limits<double>::infinity();
    for (size_t s = 0; s < queues.size(); ++s) {
      if (!queues[s].running)
        continue;
      Medium medium = costOfSpan(queues[s].spans[queues[s].next]).medium;
      if (isCollective(medium))
        rates[s] = 1.0 / users[size_t(medium)];
      else if (medium == Medium::None && collectives > 0)
        rates[s] = 1.0 / device.collectiveSlowdown;
      else
        rates[s] = 1;
      step = std::min(step, queues[s].left / rates[s]);
    }
    now += step;
    for (size_t s = 0; s < queues.size(); ++s) {
      Queue &queue = queues[s];
      if (!queue.running)
        continue;
      // Of two that end together, rounding must not keep one.
      bool ends = queue.left / rates[s] <= step * (1 + 1e-12);
      if (costOfSpan(queue.spans[queue.next]).medium == Medium::None)
        result.slowdown += step * (1 - rates[s]);
      queue.left -= step * rates[s];
      if (ends)
        end(queue);
    }
  }

  //===--------------------------------------------------------------------===//
  // Where the time went
  //===--------------------------------------------------------------------===//

  Stream kindOfSpan(int span) const {
    return kinds[result.spans[span].instruction];
  }

  void account() {
    kinds = timeKinds(plan);
    for (size_t i = 0; i < result.spans.size(); ++i)
      result.busy[size_t(kindOfSpan(int(i)))] +=
          result.spans[i].end - result.spans[i].begin;
    double end = 0;
    for (int span : queues[size_t(Stream::Compute)].spans) {
      const Span &entry = result.spans[span];
      int latest = -1;
      for (int other : awaited[span])
        if (latest < 0 || result.spans[other].end > result.spans[latest].end)
          latest = other;
      if (entry.begin > end && latest >= 0)
        result.exposed[size_t(kindOfSpan(latest))] += entry.begin - end;
      Stream kind = kindOfSpan(span);
      if (kind != Stream::Compute)
        result.exposed[size_t(kind)] += entry.end - entry.begin;
      end = entry.end;
    }
    // What the step ends with on another stream.
    int latest = -1;
    for (size_t i = 0; i < result.spans.size(); ++i)
      if (latest < 0 || result.spans[i].end > result.spans[latest].end)
        latest = int(i);
    if (latest >= 0 && now > end)
      result.exposed[size_t(kindOfSpan(latest))] += now - end;
  }

  const Plan &plan;
  const StepCost &cost;
  const DeviceModel &device;
  std::array<Queue, kNumStreams> queues;
  /// Per span: those whose end it waits for.
  std::vector<std::vector<int>> awaited;
  std::vector<int> recorders; ///< per event: the span that records it, or -1
  std::vector<bool> ended;
  std::vector<Stream> kinds; ///< per instruction
  double now = 0;
  Timeline result;
};

} // namespace

Stream timeKind(const Instruction &instruction) {
  const auto *call = std::get_if<Call>(&instruction.kind);
  return call && modelCollectiveKind(call->op) ? Stream::ModelAxes
                                               : ownStream(instruction);
}

std::vector<Stream> timeKinds(const Plan &plan) {
  std::vector<Stream> ofEvent;
  std::vector<Stream> kinds;
  for (const Instruction &instruction : plan.instructions) {
    Stream kind = timeKind(instruction);
    if (std::holds_alternative<Wait>(instruction.kind))
      for (EventId event : instruction.waits)
        if (size_t(event) < ofEvent.size())
          kind = ofEvent[size_t(event)];
    if (size_t event = size_t(instruction.records); instruction.records >= 0) {
      ofEvent.resize(std::max(ofEvent.size(), event + 1), Stream::Compute);
      ofEvent[event] = kind;
    }
    kinds.push_back(kind);
  }
  return kinds;
}

double Timeline::exposedCommunication() const {
  return std::accumulate(exposed.begin(), exposed.end(), 0.0) -
         exposed[size_t(Stream::Compute)];
}

Timeline simulate(const Plan &plan, const StepCost &cost,
                  const DeviceModel &device) {
  auto count = int64_t(plan.instructions.size());
  if (count > 0 && plan.accumulationSteps > kMaxRuns / count)
    throw SimulateError(
        "expected a step of at most " + std::to_string(kMaxRuns) +
        " instructions to simulate, got " + std::to_string(count) +
        " in each of " + std::to_string(plan.accumulationSteps) +
        " microbatches");
  Timeline timeline = Player(plan, cost, device).run();
  if (!(timeline.seconds <= kMaxSeconds)) {
    std::array<char, 64> got;
    std::snprintf(got.data(), got.size(), "%.3g", timeline.seconds);
    throw SimulateError("expected a step of at most 1e9 seconds, got one of " +
                        std::string(got.data()) + " on device \"" +
                        device.name + "\"");
  }
  return timeline;
}

} // namespace fsdp::simulate
