//===- AgentWatch.h - what the program that started a rank wants of it ----===//
#ifndef FSDP_RUNTIME_LAUNCH_AGENTWATCH_H
#define FSDP_RUNTIME_LAUNCH_AGENTWATCH_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Position.h"

#include <chrono>
#include <cstdint>
#include <memory>

namespace fsdp::runtime {

/// While this object lives, a rank that another program started obeys the
/// signals of that program.
///
/// USR1, TERM and INT become requests, which are taken at the end of a step. If
/// no step has begun, TERM and INT end the process with status 143 and one line
/// of message. But torchrun also sends TERM when a rank has failed, so this
/// rank has a few seconds to find out which one failed, and to report it. Once
/// steps have begun, a second signal ends the process at once, with status 130,
/// unless it comes within a second of the first: torchrun passes on what a
/// terminal has already sent to every process.
///
/// A rank does not outlive torchrun: when torchrun is gone, the process exits
/// with status 1 and one line that says where it was, whatever it waits for.
class AgentWatch {
public:
  /// Must be created before any other threads, since they must not take these
  /// signals.
  explicit AgentWatch(int64_t rank);
  AgentWatch(const AgentWatch &) = delete;
  AgentWatch &operator=(const AgentWatch &) = delete;
  ~AgentWatch();

  /// Where the rank is in its run; null: nowhere. Borrowed until the next call.
  void follow(const plan::Plan *plan, const Position *position);

  /// Ends the process, with status 1, if met() is not called within `deadline`
  /// and a few seconds. A rank that waits for a store that does not answer
  /// cannot end itself.
  void awaitMeeting(std::chrono::milliseconds deadline);
  void met();

  /// What the rank was asked for since the last call (Requests.h).
  uint32_t takeRequests();

private:
  struct State;
  std::unique_ptr<State> state;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_LAUNCH_AGENTWATCH_H
