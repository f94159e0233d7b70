//===- TraceFile.cpp - a step in time, in Chrome's JSON trace format ------===//
#include "fsdp/Plan/TraceFile.h"
#include "JsonCursor.h"
#include "fsdp/Plan/Operands.h"
#include "fsdp/Plan/Profile.h"
#include "fsdp/Support/Files.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <set>

namespace fsdp::plan {

namespace {

std::string quoted(const std::string &text) { return Json(text).dump(); }

/// Microseconds of nanoseconds: what ends where another begins does so in the
/// file.
std::string microseconds(int64_t nanoseconds) {
  char text[40];
  std::snprintf(text, sizeof(text), "%lld.%03lld",
                static_cast<long long>(nanoseconds / 1000),
                static_cast<long long>(nanoseconds % 1000));
  return text;
}

int64_t nanosecondsOf(double seconds) { return std::llround(seconds * 1e9); }

std::string digits(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9g", value);
  return text;
}

std::string title(const Plan &plan, const Instruction &instruction) {
  const auto *call = std::get_if<Call>(&instruction.kind);
  return titleOf(plan, instruction) +
         (call && call->recompute ? " (recomputed)" : "");
}

} // namespace

std::vector<Span> stepSpans(const Plan &plan) {
  std::vector<Span> spans;
  for (int64_t m = 0; m < plan.accumulationSteps; ++m)
    for (size_t i = 0; i < plan.instructions.size(); ++i)
      if (runsIn(plan, plan.instructions[i], m))
        spans.push_back({int32_t(i), int32_t(m)});
  return spans;
}

//===----------------------------------------------------------------------===//
// Writing
//===----------------------------------------------------------------------===//

void TraceWriter::event(std::string text) {
  events += events.empty() ? "\n" : ",\n";
  events += text;
}

void TraceWriter::name(const char *what, int64_t pid, size_t tid,
                       const std::string &text) {
  event("{\"ph\": \"M\", \"name\": \"" + std::string(what) + "\", \"pid\": " +
        std::to_string(pid) + ", \"tid\": " + std::to_string(tid) +
        ", \"args\": {\"name\": " + quoted(text) + "}}");
}

const TraceWriter::Text &TraceWriter::textOf(int32_t index) {
  Text &text = texts[size_t(index)];
  if (!text.before.empty())
    return text;
  const Instruction &instruction = plan.instructions[size_t(index)];
  text.before =
      "{\"ph\": \"X\", \"name\": " + quoted(title(plan, instruction)) +
      ", \"cat\": \"" + std::string(phaseName(instruction.phase)) +
      "\", \"tid\": " + std::to_string(int(instruction.stream)) + ", \"pid\": ";
  text.after = ", \"args\": {\"program\": \"step\", \"instruction\": " +
               std::to_string(index);
  if (instruction.module >= 0)
    text.after +=
        ", \"module\": " + quoted(plan.modules[size_t(instruction.module)]);
  if (int32_t unit = unitOfInstruction(plan, instruction); unit >= 0)
    text.after += ", \"unit\": " + quoted(plan.units[size_t(unit)].name);
  text.after += ", \"what\": " + quoted(signature(plan, instruction));
  if (!instruction.why.empty())
    text.after += ", \"why\": " + quoted(instruction.why);
  text.after += ", \"microbatch\": ";
  return text;
}

void TraceWriter::process(int64_t pid, const std::string &processName,
                          const std::vector<Span> &spans) {
  name("process_name", pid, 0, processName);
  std::set<Stream> used;
  for (const Span &span : spans)
    used.insert(plan.instructions[size_t(span.instruction)].stream);
  for (Stream stream : used)
    name("thread_name", pid, size_t(stream), std::string(streamName(stream)));
  for (const Span &span : spans) {
    const Text &text = textOf(span.instruction);
    int64_t begin = nanosecondsOf(span.begin);
    event(text.before + std::to_string(pid) +
          ", \"ts\": " + microseconds(begin) +
          ", \"dur\": " + microseconds(nanosecondsOf(span.end) - begin) +
          text.after + std::to_string(span.microbatch) + "}}");
  }
}

void TraceWriter::counter(
    int64_t pid, const std::string &counterName, double seconds,
    const std::vector<std::pair<std::string, double>> &values) {
  std::string text = "{\"ph\": \"C\", \"name\": " + quoted(counterName) +
                     ", \"pid\": " + std::to_string(pid) +
                     ", \"ts\": " + microseconds(nanosecondsOf(seconds)) +
                     ", \"args\": {";
  const char *separator = "";
  for (const auto &[key, value] : values) {
    text += separator + quoted(key) + ": " + digits(value);
    separator = ", ";
  }
  event(text + "}}");
}

std::string TraceWriter::finish(const std::string &otherData) const {
  return "{\"displayTimeUnit\": \"ms\"" +
         (otherData.empty() ? "" : ", \"otherData\": " + otherData) +
         ", \"traceEvents\": [" + events + "\n]}\n";
}

std::string printMeasuredStep(const Plan &plan, const MeasuredStep &step) {
  TraceWriter writer(plan);
  std::string other = "{\"format\": " + std::to_string(kTraceFormat) +
                      ", \"plan\": " + quoted(step.planHash) +
                      ", \"world_size\": " + std::to_string(step.worldSize) +
                      ", \"step\": " + std::to_string(step.step) +
                      ", \"ranks\": [";
  const char *separator = "";
  for (const MeasuredStep::Rank &rank : step.ranks) {
    writer.process(rank.rank, "rank " + std::to_string(rank.rank), rank.spans);
    other += separator + ("{\"rank\": " + std::to_string(rank.rank)) +
             ", \"us\": " + microseconds(nanosecondsOf(rank.seconds)) + "}";
    separator = ", ";
  }
  return writer.finish(other + "]}");
}

//===----------------------------------------------------------------------===//
// Reading
//===----------------------------------------------------------------------===//

namespace {

/// Seconds from microseconds.
double secondsAt(const Cursor &cursor) {
  if (!cursor.json().is_number())
    cursor.expected("microseconds");
  double value = cursor.json().get<double>();
  if (!(value >= 0 && value <= 1e15))
    cursor.error("expected microseconds of at least 0 and at most 1e15");
  return value * 1e-6;
}

MeasuredStep readHeader(const Cursor &other, const Plan &plan,
                        const std::string &planHash) {
  if (int64_t format = other.at("format").integer(); format != kTraceFormat)
    other.at("format").error("expected " + std::to_string(kTraceFormat) +
                             ", got " + std::to_string(format));
  MeasuredStep step;
  step.planHash = other.at("plan").string();
  if (step.planHash != planHash)
    other.at("plan").error("expected a step of this plan, \"" + planHash +
                           "\", got one of \"" + step.planHash + '"');
  step.worldSize =
      other.at("world_size").integer(plan.worldSize, plan.worldSize);
  step.step = other.at("step").integer(1);
  std::set<int64_t> seen;
  other.at("ranks").each([&](const Cursor &item) {
    int64_t rank = item.at("rank").integer(0, step.worldSize - 1);
    if (!seen.insert(rank).second)
      item.at("rank").error("rank " + std::to_string(rank) + " is given twice");
    step.ranks.push_back({rank, secondsAt(item.at("us")), {}});
  });
  return step;
}

} // namespace

MeasuredStep parseMeasuredStep(std::string_view json, const std::string &origin,
                               const Plan &plan, const std::string &planHash) {
  Json tree = parseJson(json, origin);
  Cursor root(tree, origin);
  if (!root.isObject() || !root.has("otherData") ||
      !root.at("otherData").has("plan"))
    root.error("expected a trace that fsdp-run --trace wrote");
  MeasuredStep step = readHeader(root.at("otherData"), plan, planHash);
  root.at("traceEvents").each([&](const Cursor &event) {
    if (event.at("ph").string() != "X")
      return;
    int64_t pid = event.at("pid").integer();
    auto rank = std::find_if(
        step.ranks.begin(), step.ranks.end(),
        [&](const MeasuredStep::Rank &rank) { return rank.rank == pid; });
    if (rank == step.ranks.end())
      event.at("pid").error("expected a rank of otherData.ranks, got " +
                            std::to_string(pid));
    Cursor args = event.at("args");
    auto count = int64_t(plan.instructions.size());
    double begin = secondsAt(event.at("ts"));
    rank->spans.push_back(
        {int32_t(args.at("instruction").integer(0, count - 1)),
         int32_t(args.at("microbatch").integer(0, plan.accumulationSteps - 1)),
         begin, begin + secondsAt(event.at("dur"))});
  });
  std::vector<Span> wanted = stepSpans(plan);
  auto differs = [](const Span &a, const Span &b) {
    return a.instruction != b.instruction || a.microbatch != b.microbatch;
  };
  for (const MeasuredStep::Rank &rank : step.ranks) {
    std::string what = "the events of rank " + std::to_string(rank.rank);
    if (rank.spans.size() != wanted.size())
      root.at("traceEvents")
          .error(what + ": expected " + std::to_string(wanted.size()) +
                 ", one per instruction and microbatch, got " +
                 std::to_string(rank.spans.size()));
    for (size_t i = 0; i < wanted.size(); ++i)
      if (differs(rank.spans[i], wanted[i]))
        root.at("traceEvents")
            .error(what + ": expected instruction " +
                   std::to_string(wanted[i].instruction) + " of microbatch " +
                   std::to_string(wanted[i].microbatch) + " at " +
                   std::to_string(i) + ", got instruction " +
                   std::to_string(rank.spans[i].instruction) +
                   " of microbatch " +
                   std::to_string(rank.spans[i].microbatch));
  }
  return step;
}

MeasuredStep readMeasuredStep(const std::string &path, const Plan &plan,
                              const std::string &planHash) {
  std::string text;
  if (std::string error = readFile(path, kMaxJsonBytes, text); !error.empty())
    throw PlanError(path + ": " + error);
  return parseMeasuredStep(text, path, plan, planHash);
}

} // namespace fsdp::plan
