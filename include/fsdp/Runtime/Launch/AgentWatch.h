//===- AgentWatch.h - a rank ends when torchrun does ----------------------===//
#ifndef FSDP_RUNTIME_LAUNCH_AGENTWATCH_H
#define FSDP_RUNTIME_LAUNCH_AGENTWATCH_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Position.h"

#include <cstdint>
#include <memory>

namespace fsdp::runtime {

/// While it lives, a rank that torchrun started does not outlive torchrun: when
/// that is gone the process ends with status 1 and one line that says where it
/// was, from the beginning, whatever it waits for. The same at SIGTERM, by
/// which torchrun ends the ranks when one has failed; but where this rank
/// stands still it has a few seconds to find out by itself what failed, and to
/// say that. Does nothing in a process that torchrun did not start.
class AgentWatch {
public:
  /// To be made before other threads, which are not to take SIGTERM.
  explicit AgentWatch(int64_t rank);
  AgentWatch(const AgentWatch &) = delete;
  AgentWatch &operator=(const AgentWatch &) = delete;
  ~AgentWatch();

  /// Where the rank is in its run; null: nowhere. Borrowed until the next call.
  void follow(const plan::Plan *plan, const Position *position);

private:
  struct State;
  std::unique_ptr<State> state;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_LAUNCH_AGENTWATCH_H
