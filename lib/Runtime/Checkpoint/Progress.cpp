//===- Progress.cpp - how far a save is -----------------------------------===//
#include "fsdp/Runtime/Checkpoint/Progress.h"

#include <chrono>
#include <csignal>
#include <thread>

#include <unistd.h>

namespace fsdp::runtime {

void Progress::begin(int64_t ofStep) {
  step = ofStep;
  times = 0;
  position.savedStep.store(step, std::memory_order_relaxed);
}

void Progress::reach(SavePoint point) {
  position.savePoint.store(point, std::memory_order_relaxed);
  beat();
  if (!fault || fault->rank != rank || fault->step != step ||
      fault->point != point || ++times != fault->times)
    return;
  kill(getpid(), fault->signal);
  // It goes to another thread where this one blocks it.
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
}

} // namespace fsdp::runtime
