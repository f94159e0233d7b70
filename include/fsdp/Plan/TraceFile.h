//===- TraceFile.h - a step in time, in Chrome's JSON trace format --------===//
//
// What `fsdp-opt --emit trace` and `fsdp-run --trace` write, in one form, and
// how the latter is read back. Uses the standard library only, as Plan.h does.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_PLAN_TRACEFILE_H
#define FSDP_PLAN_TRACEFILE_H

#include "fsdp/Plan/Plan.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fsdp::plan {

/// One execution of an instruction of the step; seconds from the step's
/// beginning.
struct Span {
  int32_t instruction = 0;
  int32_t microbatch = 0;
  double begin = 0, end = 0;
};

/// What a step executes, in the order in which the host issues it, without
/// times: forward and backward once per microbatch, except for what a
/// microbatch leaves out, then the optimizer phase in the last one.
std::vector<Span> stepSpans(const Plan &plan);

/// Writes processes with one thread per stream and one event per instruction,
/// with its module, unit and shapes, in microseconds.
class TraceWriter {
public:
  explicit TraceWriter(const Plan &plan)
      : plan(plan), texts(plan.instructions.size()) {}

  /// Spans of one stream do not overlap.
  void process(int64_t pid, const std::string &name,
               const std::vector<Span> &spans);
  /// The values of a counter of a process at one time.
  void counter(int64_t pid, const std::string &name, double seconds,
               const std::vector<std::pair<std::string, double>> &values);
  /// The file's text; `otherData` is a JSON object for it, if not empty.
  std::string finish(const std::string &otherData = {}) const;

private:
  struct Text {
    std::string before, after; ///< process and times
  };
  void name(const char *what, int64_t pid, size_t tid, const std::string &text);
  void event(std::string text);
  const Text &textOf(int32_t instruction);

  const Plan &plan;
  std::vector<Text> texts; ///< by instruction; empty: not written yet
  std::string events;
};

inline constexpr int64_t kTraceFormat = 1;

/// A step that ranks executed.
struct MeasuredStep {
  struct Rank {
    int64_t rank = 0;
    double seconds = 0; ///< of the step
    std::vector<Span> spans;
  };

  /// Of the plan's file, as Profile::planHash.
  std::string planHash;
  int64_t worldSize = 1;
  int64_t step = 1; ///< counted from 1
  std::vector<Rank> ranks;
};

/// One process per rank, with the rank as its number.
std::string printMeasuredStep(const Plan &plan, const MeasuredStep &step);

/// Reads it back, to a nanosecond. `planHash` is that of `plan`. Throws a
/// PlanError that names `origin`: for JSON that is not such a trace, for a
/// trace of another plan, and for events that the plan does not execute.
MeasuredStep parseMeasuredStep(std::string_view json, const std::string &origin,
                               const Plan &plan, const std::string &planHash);
/// Reads a file. Throws PlanError.
MeasuredStep readMeasuredStep(const std::string &path, const Plan &plan,
                              const std::string &planHash);

} // namespace fsdp::plan

#endif // FSDP_PLAN_TRACEFILE_H
