//===- Progress.cpp - how far a save is -----------------------------------===//
#include "fsdp/Runtime/Checkpoint/Progress.h"

#include <csignal>

#include <unistd.h>

namespace fsdp::runtime {

void Progress::begin(int64_t ofStep) {
  step = ofStep;
  times = 0;
  position.savedStep.store(step, std::memory_order_relaxed);
}

void Progress::reach(SavePoint point) {
  position.savePoint.store(point, std::memory_order_relaxed);
  if (fault && fault->rank == rank && fault->step == step &&
      fault->point == point && ++times == fault->times)
    kill(getpid(), fault->signal);
}

} // namespace fsdp::runtime
