//===- Progress.h - how far a save is, and failures made on purpose -------===//
#ifndef FSDP_RUNTIME_CHECKPOINT_PROGRESS_H
#define FSDP_RUNTIME_CHECKPOINT_PROGRESS_H

#include "fsdp/Runtime/Position.h"
#include "fsdp/Runtime/SavePoint.h"

#include <cstdint>
#include <optional>

namespace fsdp::runtime {

/// A signal that a rank sends to itself, for tests of what follows.
struct SaveFault {
  int64_t rank = 0;
  int64_t step = 0; ///< the step of the checkpoint
  SavePoint point = SavePoint::None;
  int64_t times = 1; ///< at which time that the rank reaches the point
  int signal = 0;
};

/// Of one rank. Each method may be called from one thread at a time.
class Progress {
public:
  /// Borrows the position.
  Progress(int64_t rank, Position &position, std::optional<SaveFault> fault)
      : rank(rank), position(position), fault(fault) {}

  void begin(int64_t ofStep);
  /// Called before the rank does what the point says.
  void reach(SavePoint point);
  void end() { reach(SavePoint::None); }
  /// Reports that the rank makes progress; called for every part of long work.
  void beat() { position.beat(); }

private:
  int64_t rank;
  Position &position;
  std::optional<SaveFault> fault;
  int64_t step = 0, times = 0;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CHECKPOINT_PROGRESS_H
