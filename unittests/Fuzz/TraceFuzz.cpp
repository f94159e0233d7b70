//===- TraceFuzz.cpp - the reader of measured steps -----------------------===//
#include "Fuzz.h"
#include "Support/SamplePlan.h"
#include "fsdp/Plan/TraceFile.h"

using namespace fsdp;

/// What is accepted has every instruction of the plan, with finite times.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const plan::Plan plan = test::samplePlan(2);
  std::string_view text(reinterpret_cast<const char *>(data), size);
  try {
    plan::MeasuredStep step =
        plan::parseMeasuredStep(text, "trace.json", plan, "xxh3:0");
    for (const plan::MeasuredStep::Rank &rank : step.ranks) {
      fuzz::require(rank.spans.size() == plan::stepSpans(plan).size(),
                    "expected a span of each instruction");
      for (const plan::Span &span : rank.spans)
        fuzz::require(span.begin >= 0 && span.end >= span.begin,
                      "expected spans that end after they begin");
    }
  } catch (const plan::PlanError &error) {
    fuzz::requireMessage(error.what(), "trace.json: ");
  }
  return 0;
}
