//===- LowerBound.cpp - the least time of a plan's instructions -----------===//
#include "fsdp/Simulate/LowerBound.h"

#include "fsdp/Plan/Operands.h"
#include "fsdp/Simulate/Format.h"
#include "fsdp/Simulate/Simulator.h"

#include <array>
#include <cstdio>
#include <string_view>

namespace fsdp::simulate {

using namespace plan;

LowerBound lowerBound(const Plan &plan, const StepCost &cost,
                      const DeviceModel &device) {
  std::array<double, kNumStreams> streams = {};
  double all = 0, withinHost = 0, betweenHosts = 0;
  for (size_t i = 0; i < plan.instructions.size(); ++i) {
    const Instruction &instruction = plan.instructions[i];
    const Cost &one = cost.instructions[i];
    if (one.seconds <= 0)
      continue;
    double seconds = one.seconds * double(runsPerStep(plan, instruction));
    all += seconds;
    if (std::holds_alternative<Wait>(instruction.kind))
      continue; // of whichever stream it waits for
    Stream kind = timeKind(instruction);
    streams[size_t(kind)] += seconds;
    // They run where the model calls them.
    if (kind == Stream::ModelAxes)
      streams[size_t(Stream::Compute)] += seconds;
    if (one.medium == Medium::WithinHost)
      withinHost += seconds;
    else if (one.medium == Medium::BetweenHosts)
      betweenHosts += seconds;
  }
  LowerBound bound;
  auto atLeast = [&](double seconds, std::string_view of) {
    if (seconds > bound.seconds)
      bound = {seconds, std::string(of)};
  };
  if (device.serialStreams)
    atLeast(all, "one thread");
  for (size_t s = 0; s < kNumStreams; ++s)
    atLeast(streams[s], streamName(Stream(s)));
  if (bound.of == "compute" && streams[size_t(Stream::ModelAxes)] > 0)
    bound.of = "compute and collectives of the model";
  atLeast(withinHost, "collectives within a host");
  atLeast(betweenHosts, "collectives between hosts");
  bound.seconds += cost.outsideSeconds;
  return bound;
}

std::string describeGap(const LowerBound &bound, double stepSeconds) {
  std::array<char, 32> percent = {};
  if (bound.seconds > 0)
    std::snprintf(percent.data(), percent.size(), "%.1f %% above ",
                  100 * (stepSeconds / bound.seconds - 1));
  return percent.data() +
         ("the least time of its instructions, " +
          formatMilliseconds(bound.seconds)) +
         (bound.of.empty() ? "" : " of " + bound.of);
}

} // namespace fsdp::simulate
