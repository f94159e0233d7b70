//===- Profiler.h - measured seconds of a plan's instructions -------------===//
#ifndef FSDP_RUNTIME_EXECUTION_PROFILER_H
#define FSDP_RUNTIME_EXECUTION_PROFILER_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Plan/Profile.h"
#include "fsdp/Runtime/Collectives/Comm.h"
#include "fsdp/Runtime/Files/Files.h"

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::runtime {

/// Measures the instructions of the training step on one rank, by wall clock:
/// for a collective, the time that this rank waits in it. To be used from one
/// thread.
class Profiler {
public:
  /// Steps that are not counted: operators allocate and choose kernels in them.
  static constexpr int64_t kWarmup = 2;

  explicit Profiler(const plan::Plan &plan);

  void begin() { started = Clock::now(); }
  void end(size_t instruction) {
    current[instruction] +=
        std::chrono::duration<double>(Clock::now() - started).count();
    ++runs[instruction];
  }
  /// Ends a step that took `seconds` in all.
  void endStep(double seconds);

  /// This rank's medians over the steps after the warm-up. The last element is
  /// what the median step takes beyond them: the batch, the loss, statistics,
  /// and what delays this instruction or that in every step.
  std::vector<double> medians() const;

private:
  using Clock = std::chrono::steady_clock;

  Clock::time_point started;
  int64_t steps = 0;
  std::vector<double> current; ///< seconds in this step
  std::vector<int64_t> runs;   ///< executions so far
  /// Per instruction, its time in each counted step, all executions; then the
  /// step's.
  std::vector<std::vector<float>> samples;
};

/// Writes the profile of all ranks, the mean of their medians: since ranks wait
/// for each other in collectives, the means of all instructions add up to a
/// step. Of their `scratchBytes` (RankArena::extraBytes) it writes the maximum.
/// Collective; rank 0 writes and commits `file`, null on the others. `planPath`
/// is hashed. Throws InputError or RunError.
void writeProfile(const Profiler &profiler, const plan::Plan &plan,
                  const std::string &planPath, Comm &comm, int64_t steps,
                  int64_t scratchBytes, OutputFile *file);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_EXECUTION_PROFILER_H
