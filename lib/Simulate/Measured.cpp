//===- Measured.cpp - a measured step beside the planned one --------------===//
#include "fsdp/Simulate/Measured.h"

#include "fsdp/Plan/Profile.h"

#include <algorithm>
#include <cmath>
#include <map>

namespace fsdp::simulate {

using namespace plan;

Breakdown breakDown(const Plan &plan, const std::vector<Span> &spans,
                    double seconds) {
  // What computes, by phase, is before all transfers.
  constexpr size_t kPhases = std::tuple_size_v<decltype(Breakdown::compute)>;
  constexpr size_t kClasses = kPhases + kNumStreams;
  struct Edge {
    double time;
    int change;
    size_t of;
  };
  std::vector<Stream> kinds = timeKinds(plan);
  std::vector<Edge> edges;
  for (const Span &span : spans) {
    Stream kind = kinds[size_t(span.instruction)];
    size_t of = kind == Stream::Compute
                    ? size_t(plan.instructions[size_t(span.instruction)].phase)
                    : kPhases + size_t(kind);
    edges.push_back({span.begin, 1, of});
    edges.push_back({span.end, -1, of});
  }
  std::sort(edges.begin(), edges.end(),
            [](const Edge &a, const Edge &b) { return a.time < b.time; });
  Breakdown result;
  std::array<int, kClasses> active = {};
  double before = 0, inside = 0;
  for (const Edge &edge : edges) {
    auto *of = std::find_if(active.begin(), active.end(),
                            [](int count) { return count > 0; });
    if (double length = edge.time - before; of != active.end()) {
      auto index = size_t(of - active.begin());
      (index < kPhases ? result.compute[index]
                       : result.exposed[index - kPhases]) += length;
      inside += length;
    }
    active[edge.of] += edge.change;
    before = edge.time;
  }
  result.outside = std::max(seconds - inside, 0.0);
  return result;
}

std::vector<Difference> largestDifferences(const Plan &plan,
                                           const std::vector<Span> &planned,
                                           const std::vector<Span> &measured,
                                           size_t most) {
  std::vector<Stream> kinds = timeKinds(plan);
  std::map<std::string, Difference> byWhat;
  for (size_t i = 0; i < planned.size(); ++i) {
    auto index = size_t(planned[i].instruction);
    if (kinds[index] != Stream::Compute)
      continue;
    std::string what = signature(plan, plan.instructions[index]);
    if (what == "none")
      continue;
    Difference &entry = byWhat[what];
    entry.what = what;
    ++entry.runs;
    entry.planned += planned[i].end - planned[i].begin;
    entry.measured += measured[i].end - measured[i].begin;
  }
  std::vector<Difference> result;
  for (auto &[what, difference] : byWhat)
    result.push_back(std::move(difference));
  std::sort(result.begin(), result.end(),
            [](const Difference &a, const Difference &b) {
              double ofA = std::abs(a.measured - a.planned);
              double ofB = std::abs(b.measured - b.planned);
              return ofA != ofB ? ofA > ofB : a.what < b.what;
            });
  result.resize(std::min(result.size(), most));
  return result;
}

} // namespace fsdp::simulate
