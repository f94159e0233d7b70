//===- Trace.cpp - a simulated step for chrome://tracing and Perfetto -----===//
#include "fsdp/Simulate/Trace.h"

#include "fsdp/Plan/Profile.h"

#include "llvm/Support/JSON.h"
#include "llvm/Support/raw_ostream.h"

#include <type_traits>

namespace fsdp::simulate {

using namespace plan;

namespace {

/// The operator, or the collective with its unit.
std::string title(const Plan &plan, const Instruction &instruction) {
  if (const auto *call = std::get_if<Call>(&instruction.kind))
    return call->recompute ? call->op + " (recomputed)" : call->op;
  std::string what = signature(plan, instruction);
  std::string name = what.substr(0, what.find(' '));
  return std::visit(
      [&](const auto &kind) {
        if constexpr (requires { kind.unit; })
          return name + ' ' + plan.units[kind.unit].name;
        else
          return name;
      },
      instruction.kind);
}

class Printer {
public:
  Printer(const Plan &plan, llvm::raw_ostream &os) : plan(plan), json(os) {}

  void run(const std::vector<RankTimeline> &ranks) {
    json.object([&] {
      json.attribute("displayTimeUnit", "ms");
      json.attributeArray("traceEvents", [&] {
        for (const RankTimeline &rank : ranks)
          print(rank);
      });
    });
  }

private:
  void name(const char *what, int64_t rank, int64_t stream, std::string text) {
    json.object([&] {
      json.attribute("ph", "M");
      json.attribute("name", what);
      json.attribute("pid", rank);
      json.attribute("tid", stream);
      json.attributeObject("args", [&] { json.attribute("name", text); });
    });
  }

  void print(const RankTimeline &rank) {
    name("process_name", rank.rank, 0, "rank " + std::to_string(rank.rank));
    bool used[kNumStreams] = {};
    for (const Span &span : rank.timeline.spans)
      used[size_t(plan.instructions[span.instruction].stream)] = true;
    for (size_t s = 0; s < kNumStreams; ++s)
      if (used[s])
        name("thread_name", rank.rank, int64_t(s),
             std::string(streamName(Stream(s))));
    for (const Span &span : rank.timeline.spans)
      if (span.end > span.begin)
        print(rank.rank, span);
    for (const MemorySample &sample : rank.memory)
      print(rank.rank, sample);
  }

  void print(int64_t rank, const Span &span) {
    const Instruction &instruction = plan.instructions[span.instruction];
    json.object([&] {
      json.attribute("ph", "X");
      json.attribute("name", title(plan, instruction));
      json.attribute("cat", llvm::StringRef(phaseName(instruction.phase)));
      json.attribute("pid", rank);
      json.attribute("tid", int64_t(instruction.stream));
      json.attribute("ts", span.begin * 1e6);
      json.attribute("dur", (span.end - span.begin) * 1e6);
      json.attributeObject("args", [&] {
        json.attribute("instruction", span.instruction);
        if (instruction.module >= 0)
          json.attribute("module", plan.modules[instruction.module]);
        json.attribute("what", signature(plan, instruction));
        if (!instruction.why.empty())
          json.attribute("why", instruction.why);
        if (plan.accumulationSteps > 1)
          json.attribute("microbatch", span.microbatch);
      });
    });
  }

  void print(int64_t rank, const MemorySample &sample) {
    json.object([&] {
      json.attribute("ph", "C");
      json.attribute("name", "memory, MiB");
      json.attribute("pid", rank);
      json.attribute("ts", sample.time * 1e6);
      json.attributeObject("args", [&] {
        for (size_t use = 0; use < kNumMemoryUses; ++use)
          json.attribute(memoryUseName(MemoryUse(use)),
                         double(sample.bytes[use]) / double(1 << 20));
      });
    });
  }

  const Plan &plan;
  llvm::json::OStream json;
};

} // namespace

std::string printTrace(const Plan &plan,
                       const std::vector<RankTimeline> &ranks) {
  std::string text;
  llvm::raw_string_ostream os(text);
  Printer(plan, os).run(ranks);
  return text + '\n';
}

} // namespace fsdp::simulate
