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
  int64_t step = 0; ///< that the checkpoint is of
  SavePoint point = SavePoint::None;
  int64_t times = 1; ///< at the so-many-th time that it comes there
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
  /// Tells that the rank moves on, with every part of what takes long.
  void beat() { position.beat(); }

private:
  int64_t rank;
  Position &position;
  std::optional<SaveFault> fault;
  int64_t step = 0, times = 0;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CHECKPOINT_PROGRESS_H
