//===- SegmentSights.cpp - what a rank of a segment sees of the others ----===//
#include "fsdp/Runtime/Collectives/SegmentSights.h"

#include <fstream>
#include <string>

namespace fsdp::runtime {

std::vector<RankSight> SegmentSights::look() {
  std::vector<RankSight> sights;
  for (int64_t r = 0; r < segment.layout().worldSize; ++r) {
    const RankState &state = segment.state(r);
    sights.push_back({state.position.step.load(),
                      state.position.instruction.load(),
                      state.position.beats.load(), state.position.saving.load(),
                      state.waits.load() > 0});
  }
  return sights;
}

std::string SegmentSights::obstacle(int64_t peer) {
  int32_t pid = segment.state(peer).pid.load();
  if (pid == 0)
    return "";
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text);
  // "pid (name) state", and a name may be anything.
  size_t end = text.rfind(')');
  if (end == std::string::npos || end + 2 >= text.size())
    return "";
  char state = text[end + 2];
  return state == 'T' || state == 't'
             ? "is stopped (pid " + std::to_string(pid) + ")"
             : "";
}

int32_t SegmentSights::process(int64_t peer) {
  return segment.state(peer).pid.load();
}

void SegmentSights::addWaits(int change) {
  if (rank >= 0)
    segment.state(rank).waits += change;
}

} // namespace fsdp::runtime
