//===- Requests.h - what a run is asked for while it trains ---------------===//
//
// A signal or a limit asks a rank; the ranks agree at the end of every step, in
// Comm::exchangeStats, so that all of them save, or stop, after the same one.
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

/// Bits of RankStats::requests. What stops a run is a bit of its own for every
/// cause.
inline constexpr uint32_t kSaveRequest = 1; ///< USR1
inline constexpr uint32_t kStopByTerm = 2;
inline constexpr uint32_t kStopByInterrupt = 4;
inline constexpr uint32_t kStopByTimeLimit = 8;
inline constexpr uint32_t kStopRequest =
    kStopByTerm | kStopByInterrupt | kStopByTimeLimit;

/// What any of the ranks was asked for; the same on all of them.
uint32_t requestsOf(const std::vector<RankStats> &stats);

/// The signals that ask: INT, TERM and USR1.
sigset_t askingSignals();
/// What one of them asks for; 0 for others.
uint32_t requestOf(int signal);
/// What those ask that wait for this process, which blocks them; takes them.
uint32_t takePendingSignals();

/// "TERM", "INT" or "--time-limit": one cause of a stop.
std::string nameStop(uint32_t requests);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_LAUNCH_REQUESTS_H
