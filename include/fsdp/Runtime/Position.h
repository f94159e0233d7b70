//===- Position.h - where a rank is in its run ----------------------------===//
#ifndef FSDP_RUNTIME_POSITION_H
#define FSDP_RUNTIME_POSITION_H

#include "fsdp/Runtime/SavePoint.h"

#include <atomic>
#include <cstdint>

namespace fsdp::runtime {

/// Kept up to date by the executor, in memory that outlives the process, for
/// whoever has to report its death. -1 before the first step.
struct Position {
  std::atomic<int64_t> step{-1}; ///< counted from 0
  /// Counted within the step; the evaluation's instructions are numbered after
  /// the step's last.
  std::atomic<int64_t> instruction{-1};
  /// The steps are over: weights are gathered and written.
  std::atomic<bool> saving{false};
  /// The point reached in a checkpoint that is read or written, even during
  /// later steps.
  std::atomic<SavePoint> savePoint{SavePoint::None};
  std::atomic<int64_t> savedStep{0}; ///< steps done when that was saved
  /// Counts up with every part of long work other than instructions: reading
  /// weights and data, saving. A rank whose count moves is not taken for hung.
  std::atomic<uint64_t> beats{0};

  void beat() { beats.fetch_add(1, std::memory_order_relaxed); }
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_POSITION_H
