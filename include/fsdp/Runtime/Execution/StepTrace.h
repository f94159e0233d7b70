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
/// stream, by the device's clock (on a GPU everything is timed by its events,
/// even what the host does in between). Time zero is the rank's own start of
/// the step, so times of different ranks cannot be compared.
///
/// An instruction begins when the events that it waits for are complete. A
/// collective begins when it is launched and ends when the wait for it ends.
class StepTrace {
public:
  /// Steps before the one that is measured: operators allocate and choose
  /// kernels in them.
  static constexpr int64_t kWarmup = 2;

  /// Borrows both. Creates all marks up front, so that the step creates none.
  StepTrace(const plan::Plan &plan, Device &device);

  /// Begin and end of the step; nothing may be in flight at either.
  void beginStep();
  void endStep();
  /// To be called within the work of the instruction, on its stream.
  void begin(int64_t microbatch, size_t instruction) {
    timer->mark(markOf(microbatch, instruction));
  }
  void end(int64_t microbatch, size_t instruction) {
    timer->mark(markOf(microbatch, instruction) + 1);
  }

  /// After the step: its seconds.
  double seconds() const;
  /// After the step: as plan::stepSpans, with times. Where one thread executes
  /// all streams, several collectives of a stream can be in flight at once:
  /// here each begins when the one before it has ended, as on a separate
  /// stream.
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
