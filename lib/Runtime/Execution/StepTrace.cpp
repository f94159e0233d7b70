//===- StepTrace.cpp - when a step's instructions begin and end -----------===//
#include "fsdp/Runtime/Execution/StepTrace.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Files/SafeTensors.h"

#include <algorithm>
#include <array>

namespace fsdp::runtime {

StepTrace::StepTrace(const plan::Plan &plan, Device &device)
    : plan(plan), device(device), timer(device.makeTimer(marks() + 1)) {}

void StepTrace::beginStep() {
  device.synchronize();
  timer->start();
}

void StepTrace::endStep() {
  device.synchronize();
  timer->mark(marks());
  device.synchronize();
}

double StepTrace::seconds() const { return timer->seconds(marks()); }

std::vector<plan::Span> StepTrace::spans() const {
  std::vector<plan::Span> spans = plan::stepSpans(plan);
  std::array<double, plan::kNumStreams> ended = {};
  for (plan::Span &span : spans) {
    auto index = size_t(span.instruction);
    size_t mark = markOf(span.microbatch, index);
    double &before = ended[size_t(plan.instructions[index].stream)];
    span.begin = std::max(timer->seconds(mark), before);
    span.end = std::max(timer->seconds(mark + 1), span.begin);
    before = span.end;
  }
  return spans;
}

void writeTrace(const StepTrace &trace, const plan::Plan &plan,
                const std::string &planPath, Comm &comm, int64_t step,
                OutputFile *file) {
  std::vector<double> own = {trace.seconds()};
  for (const plan::Span &span : trace.spans()) {
    own.push_back(span.begin);
    own.push_back(span.end);
  }
  std::vector<std::vector<double>> all = comm.gather(own);
  if (comm.rank() != 0)
    return;
  plan::MeasuredStep measured;
  measured.planHash = hashBytes(readFile(planPath));
  measured.worldSize = plan.worldSize;
  measured.step = step;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    measured.ranks.push_back(
        {int64_t(rank), all[rank][0], plan::stepSpans(plan)});
    for (size_t i = 0; plan::Span &span : measured.ranks.back().spans) {
      span.begin = all[rank][++i];
      span.end = all[rank][++i];
    }
  }
  file->write(plan::printMeasuredStep(plan, measured));
  file->commit();
}

} // namespace fsdp::runtime
