//===- StepTrace.h - when a step's instructions begin and end -------------===//
#ifndef FSDP_RUNTIME_EXECUTION_STEPTRACE_H
#define FSDP_RUNTIME_EXECUTION_STEPTRACE_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Plan/TraceFile.h"
#include "fsdp/Runtime/Collectives/Comm.h"
#include "fsdp/Runtime/Devices/Device.h"
#include "fsdp/Runtime/Files/Files.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::runtime {

/// Measures one step of a rank: begin and end of every instruction on its
/// stream, by the device's clock (on a GPU all by its events, also what the
/// host does in between). Time zero is the rank's own begin of the step, so
/// that the times of two ranks do not compare.
///
/// An instruction begins when the events that it waits for are complete. A
/// collective begins where it is begun and ends where the wait for it ends.
class StepTrace {
public:
  /// Steps before the one that is measured: operators allocate and choose
  /// kernels then.
  static constexpr int64_t kWarmup = 2;

  /// Borrows both. Makes all marks, so that the step makes none.
  StepTrace(const plan::Plan &plan, Device &device);

  /// Begin and end of the step, nothing being under way.
  void beginStep();
  void endStep();
  /// Within the work of the instruction, on its stream.
  void begin(int64_t microbatch, size_t instruction) {
    timer->mark(markOf(microbatch, instruction));
  }
  void end(int64_t microbatch, size_t instruction) {
    timer->mark(markOf(microbatch, instruction) + 1);
  }

  /// After the step: its seconds.
  double seconds() const;
  /// After the step: as plan::stepSpans, with times. Where one thread executes
  /// all streams, several collectives of a stream can be under way at once:
  /// each begins here when the one before it has ended, as on a stream of its
  /// own.
  std::vector<plan::Span> spans() const;

private:
  size_t markOf(int64_t microbatch, size_t instruction) const {
    return 2 * (size_t(microbatch) * plan.instructions.size() + instruction);
  }
  size_t marks() const { return markOf(plan.accumulationSteps, 0); }

  const plan::Plan &plan;
  Device &device;
  std::unique_ptr<Timer> timer;
};

/// Writes the step `step`, counted from 1, as all ranks measured it.
/// Collective; rank 0 writes and commits `file`, null on the others. `planPath`
/// is hashed. Throws InputError or RunError.
void writeTrace(const StepTrace &trace, const plan::Plan &plan,
                const std::string &planPath, Comm &comm, int64_t step,
                OutputFile *file);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_EXECUTION_STEPTRACE_H
