//===- Requests.cpp - what a run is asked for while it trains -------------===//
#include "fsdp/Runtime/Launch/Requests.h"

#include <ctime>

namespace fsdp::runtime {

uint32_t requestsOf(const std::vector<RankStats> &stats) {
  uint32_t requests = 0;
  for (const RankStats &rank : stats)
    requests |= rank.requests;
  return requests;
}

sigset_t askingSignals() {
  sigset_t set;
  sigemptyset(&set);
  for (int signal : {SIGINT, SIGTERM, SIGUSR1})
    sigaddset(&set, signal);
  return set;
}

uint32_t takePendingSignals() {
  sigset_t signals = askingSignals();
  timespec now{};
  uint32_t requests = 0;
  for (int signal; (signal = sigtimedwait(&signals, nullptr, &now)) > 0;)
    requests |= requestOf(signal);
  return requests;
}

uint32_t requestOf(int signal) {
  switch (signal) {
  case SIGTERM:
    return kStopByTerm;
  case SIGINT:
    return kStopByInterrupt;
  case SIGUSR1:
    return kSaveRequest;
  default:
    return 0;
  }
}

std::string nameStop(uint32_t requests) {
  if (requests & kStopByTerm)
    return "TERM";
  return requests & kStopByInterrupt ? "INT" : "--time-limit";
}

} // namespace fsdp::runtime
