//===- Page.cpp - a simulated step as a page for people -------------------===//
//
// The page is Page/page.html with the style, the script and the data put in.
// The data is JSON: tables of strings, and rows of numbers that refer to them.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Simulate/Page.h"

#include "fsdp/Plan/ModelCollectives.h"
#include "fsdp/Plan/Operands.h"
#include "fsdp/Plan/Profile.h"
#include "fsdp/Simulate/Collectives.h"
#include "fsdp/Simulate/MemoryTimeline.h"

#include "llvm/ADT/StringRef.h"
#include "llvm/Support/JSON.h"
#include "llvm/Support/raw_ostream.h"

#include <cmath>
#include <map>
#include <optional>

namespace fsdp::simulate {

using namespace plan;

/// Made by CMake of lib/Simulate/Page.
llvm::StringRef pageTemplate();
llvm::StringRef pageStyle();
llvm::StringRef pageScript();

namespace {

/// Strings, each once, by number.
class Strings {
public:
  int64_t operator()(const std::string &text) {
    auto [it, isNew] = numbers.try_emplace(text, int64_t(all.size()));
    if (isNew)
      all.push_back(text);
    return it->second;
  }
  std::vector<std::string> all;

private:
  std::map<std::string, int64_t> numbers;
};

/// Nanoseconds, so that rows stay short.
int64_t nanoseconds(double seconds) { return std::llround(seconds * 1e9); }

class DataPrinter {
public:
  DataPrinter(const Plan &plan, const Cluster &cluster, const StepCost &cost,
              const Timeline &timeline, MemoryModel model,
              llvm::raw_ostream &os)
      : plan(plan), cluster(cluster), cost(cost), timeline(timeline),
        model(model), json(os) {}

  void run() {
    json.object([&] {
      printNumbers();
      printUnits();
      printInstructions();
      printSpans();
      printCollectives();
      printMemory();
      json.attributeArray("strings", [&] {
        for (const std::string &text : strings.all)
          json.value(text);
      });
    });
  }

private:
  template <typename... Numbers> void row(Numbers... numbers) {
    json.array([&] { (json.value(numbers), ...); });
  }
  template <typename Range> void names(const char *key, const Range &range) {
    json.attributeArray(key, [&] {
      for (const auto &name : range)
        json.value(llvm::StringRef(std::string_view(name)));
    });
  }

  void printNumbers() {
    json.attribute("model", plan.model);
    json.attribute("ranks", plan.jobRanks());
    json.attribute("replicas", plan.replicas);
    json.attribute("microbatches", plan.accumulationSteps);
    json.attribute("device", cluster.device.name);
    json.attribute("hosts", cluster.hosts);
    json.attribute("serial", cluster.device.serialStreams);
    json.attribute("gathersTakeMemory", model == MemoryModel::Device);
    json.attribute("capacity", cluster.device.memoryCapacity);
    json.attribute("step", timeline.seconds);
    json.attribute("exposed", timeline.exposedCommunication());
    json.attribute(
        "mfu", modelFlopsUtilization(cost, cluster.device, timeline.seconds));
    json.attribute("tokens", tokensPerStep(plan));
    json.attribute("arena", plan.arena->bytes);
    json.attribute("lowerBound", plan.arena->lowerBound);
    std::array<std::string_view, kNumStreams> streams;
    for (size_t s = 0; s < kNumStreams; ++s)
      streams[s] = streamName(Stream(s));
    names("streams", streams);
  }

  void printUnits() {
    json.attributeArray("units", [&] {
      for (const Unit &unit : plan.units) {
        double bytes = 0;
        for (int32_t param : unit.params)
          bytes += paddedBytes(plan, param,
                               plan.params[size_t(param)].computeSpec().dtype);
        json.object([&] {
          json.attribute("name", unit.name);
          json.attribute("params", int64_t(unit.params.size()));
          json.attribute("bytes", bytes);
          json.attribute("reshards", unit.reshardAfterForward);
          json.attribute("offloaded", unit.cpuOffload);
        });
      }
    });
  }

  std::string moduleOf(const Instruction &instruction) const {
    return instruction.module < 0 ? ""
                                  : plan.modules[size_t(instruction.module)];
  }

  /// [stream, phase, made again, title, module, signature, why]
  void printInstructions() {
    json.attributeArray("instructions", [&] {
      for (const Instruction &instruction : plan.instructions) {
        const auto *call = std::get_if<Call>(&instruction.kind);
        row(int64_t(instruction.stream), int64_t(instruction.phase),
            int64_t(call && call->recompute),
            strings(titleOf(plan, instruction)), strings(moduleOf(instruction)),
            strings(signature(plan, instruction)), strings(instruction.why));
      }
    });
  }

  /// [instruction, begin, end, microbatch], of those that take time and of
  /// collectives.
  void printSpans() {
    json.attributeArray("spans", [&] {
      for (size_t s = 0; s < timeline.spans.size(); ++s) {
        const Span &span = timeline.spans[s];
        if (span.end <= span.begin &&
            timeKind(plan.instructions[size_t(span.instruction)]) ==
                Stream::Compute)
          continue;
        row(int64_t(span.instruction), nanoseconds(span.begin),
            nanoseconds(span.end), int64_t(span.microbatch));
      }
    });
  }

  /// Each with its executions, [begin, end, exposed, instruction whose end it
  /// begins with or -1, queued, begin of the first use or -1, microbatch].
  /// Of a collective that the model makes.
  std::string axisOf(const CollectiveUse &use) const {
    const auto *call =
        std::get_if<Call>(&plan.instructions[size_t(use.instruction)].kind);
    return call && isModelCollective(call->op) ? plan::axisOf(*call) : "";
  }

  void printCollectives() {
    std::vector<CollectiveUse> uses = findCollectives(plan);
    std::map<int32_t, std::vector<CollectiveTime>> times;
    for (const CollectiveTime &time :
         timeCollectives(plan, uses, timeline, cluster.device))
      times[timeline.spans[size_t(time.span)].instruction].push_back(time);
    json.attributeArray("collectives", [&] {
      for (const CollectiveUse &use : uses)
        json.object([&] {
          json.attribute("instruction", use.instruction);
          json.attribute("kind", int64_t(use.kind));
          json.attribute("unit", use.unit);
          json.attribute("axis", axisOf(use));
          json.attribute("bytes", use.bytes);
          json.attribute("wait", use.wait);
          json.attribute("use", use.use);
          json.attribute("callsToWait", use.callsToWait);
          json.attribute("callsToUse", use.callsToUse);
          json.attributeArray("times", [&] {
            for (const CollectiveTime &time : times[use.instruction]) {
              const Span &span = timeline.spans[size_t(time.span)];
              int64_t cause =
                  time.cause < 0
                      ? -1
                      : timeline.spans[size_t(time.cause)].instruction;
              row(nanoseconds(span.begin), nanoseconds(span.end),
                  nanoseconds(time.exposed), cause, int64_t(time.queued),
                  time.use < 0 ? -1 : nanoseconds(time.use),
                  int64_t(span.microbatch));
            }
          });
        });
    });
  }

  /// Samples are [time, position]; a storage is [bytes, use, title, module,
  /// shape, first, last, …].
  void printMemory() {
    std::array<std::string_view, kNumMemoryUses> uses;
    for (size_t use = 0; use < kNumMemoryUses; ++use)
      uses[use] = memoryUseName(MemoryUse(use));
    names("uses", uses);
    json.attributeArray("static", [&] {
      for (int64_t bytes : staticBytes(plan, model))
        json.value(bytes);
    });
    json.attributeArray("samples", [&] {
      for (const MemorySample &sample : memoryOverTime(plan, timeline, model))
        row(nanoseconds(sample.time), int64_t(sample.position));
    });
    Memory memory = replayMemory(plan, model);
    json.attributeArray("storages", [&] {
      for (const Storage &storage : memory.storages) {
        if (storage.definition >= memory.stepPositions)
          continue; // of the evaluation
        json.array([&] {
          json.value(storage.bytes);
          json.value(int64_t(storage.use));
          const Instruction *maker =
              storage.definition < 0
                  ? nullptr
                  : &plan.instructions[size_t(storage.definition)];
          json.value(strings(maker ? titleOf(plan, *maker) : "input"));
          json.value(strings(maker ? moduleOf(*maker) : ""));
          json.value(strings(shapeOf(storage.value)));
          for (const Life &life : storage.lives)
            if (life.first < memory.stepPositions) {
              json.value(life.first);
              json.value(std::min(life.last, memory.stepPositions - 1));
            }
        });
      }
    });
  }

  std::string shapeOf(ValueId value) const {
    if (value < 0)
      return "";
    const Value &spec = plan.values[size_t(value)];
    std::string text = std::string(dtypeName(spec.dtype)) + "[";
    for (size_t i = 0; i < spec.shape.size(); ++i)
      text += (i ? ", " : "") + std::to_string(spec.shape[i]);
    return text + "]";
  }

  const Plan &plan;
  const Cluster &cluster;
  const StepCost &cost;
  const Timeline &timeline;
  const MemoryModel model;
  Strings strings;
  llvm::json::OStream json;
};

/// Safe within <script>, and the same JSON.
std::string escapeMarkup(const std::string &json) {
  std::string text;
  for (char c : json)
    if (c == '<')
      text += "\\u003c";
    else
      text += c;
  return text;
}

void put(std::string &page, llvm::StringRef name, llvm::StringRef text) {
  std::string mark = ("{{" + name + "}}").str();
  page.replace(page.find(mark), mark.size(), text.str());
}

} // namespace

std::string printPage(const Plan &plan, const Cluster &cluster,
                      const StepCost &cost, const Timeline &timeline,
                      MemoryModel model) {
  std::string data;
  llvm::raw_string_ostream os(data);
  DataPrinter(plan, cluster, cost, timeline, model, os).run();
  std::string page = pageTemplate().str();
  put(page, "style", pageStyle());
  put(page, "script", pageScript());
  put(page, "data", escapeMarkup(data));
  return page;
}

} // namespace fsdp::simulate
