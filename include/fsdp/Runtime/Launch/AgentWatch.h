//===- AgentWatch.h - what the program that started a rank wants of it ----===//
#ifndef FSDP_RUNTIME_LAUNCH_AGENTWATCH_H
#define FSDP_RUNTIME_LAUNCH_AGENTWATCH_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Position.h"

#include <chrono>
#include <cstdint>
#include <memory>

namespace fsdp::runtime {

/// While it lives, a rank that another program started hears what that wants.
///
/// USR1, TERM and INT become requests, which the end of a step takes. Where no
/// step has begun, TERM and INT end the process with status 143 and one line;
/// but torchrun sends TERM also when a rank has failed, so that this one has a
/// few seconds to find out by itself what did, and to say that. Later a second
/// one ends it at once, with status 130, unless it comes within a second:
/// torchrun passes on what a terminal has already sent to everybody.
///
/// A rank does not outlive torchrun: when that is gone the process ends with
/// status 1 and one line that says where it was, whatever it waits for.
class AgentWatch {
public:
  /// To be made before other threads, which are not to take these signals.
  explicit AgentWatch(int64_t rank);
  AgentWatch(const AgentWatch &) = delete;
  AgentWatch &operator=(const AgentWatch &) = delete;
  ~AgentWatch();

  /// Where the rank is in its run; null: nowhere. Borrowed until the next call.
  void follow(const plan::Plan *plan, const Position *position);

  /// Ends the process, with status 1, if met() is not called by `deadline` and
  /// a few seconds: who waits for a store that does not answer cannot do that.
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
