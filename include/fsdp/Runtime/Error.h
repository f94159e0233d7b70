//===- Error.h - what can go wrong in a run -------------------------------===//
#ifndef FSDP_RUNTIME_ERROR_H
#define FSDP_RUNTIME_ERROR_H

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::runtime {

/// What fsdp-run was given cannot be used: plan, weights, data, options or
/// environment. Exit status 2.
struct InputError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A run that had begun failed: an operator threw, a peer died. Exit status 1.
struct RunError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A peer died while this rank waited for it, or makes no progress; the message
/// says where.
struct PeerLostError : RunError {
  using RunError::RunError;
};

/// A wait has passed its deadline. Whatever waits for the ranks' processes or
/// their store may wait for ever, too.
struct PeerHungError : PeerLostError {
  PeerHungError(const std::string &message, std::vector<int32_t> processes)
      : PeerLostError(message), processes(std::move(processes)) {}

  /// Processes of this host that hold up the others, as far as that is known.
  std::vector<int32_t> processes;
};

/// Another rank failed first and reports the cause; this one only stops.
struct AbortedError : RunError {
  using RunError::RunError;
};

inline constexpr int kExitRunFailure = 1;
inline constexpr int kExitBadInput = 2;
/// The run was asked to stop, and did, after a whole step or before its first.
inline constexpr int kExitStopped = 143;
/// It was asked twice, and ended at once.
inline constexpr int kExitStoppedAtOnce = 130;

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_ERROR_H
