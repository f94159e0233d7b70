//===- Requests.h - what a run is asked for while it trains ---------------===//
//
// A signal or a limit makes a request to a rank; the ranks agree on requests at
// the end of every step, in Comm::exchangeStats, so that all of them save, or
// stop, after the same step.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_LAUNCH_REQUESTS_H
#define FSDP_RUNTIME_LAUNCH_REQUESTS_H

#include "fsdp/Runtime/Collectives/Comm.h"

#include <csignal>
#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::runtime {

/// Bits of RankStats::requests. Each cause that stops a run has its own bit.
inline constexpr uint32_t kSaveRequest = 1; ///< USR1
inline constexpr uint32_t kStopByTerm = 2;
inline constexpr uint32_t kStopByInterrupt = 4;
inline constexpr uint32_t kStopByTimeLimit = 8;
inline constexpr uint32_t kStopRequest =
    kStopByTerm | kStopByInterrupt | kStopByTimeLimit;

/// What any of the ranks was asked for; the same on all of them.
uint32_t requestsOf(const std::vector<RankStats> &stats);

/// The signals that make requests: INT, TERM and USR1.
sigset_t askingSignals();
/// What one of these signals asks for; 0 for other signals.
uint32_t requestOf(int signal);
/// Takes the pending ones of these signals, which this process blocks, and
/// returns what they ask for.
uint32_t takePendingSignals();

/// "TERM", "INT" or "--time-limit": one cause of a stop.
std::string nameStop(uint32_t requests);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_LAUNCH_REQUESTS_H
