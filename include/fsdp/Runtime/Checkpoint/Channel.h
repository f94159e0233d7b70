//===- Channel.h - what ranks tell each other about checkpoints -----------===//
#ifndef FSDP_RUNTIME_CHECKPOINT_CHANNEL_H
#define FSDP_RUNTIME_CHECKPOINT_CHANNEL_H

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::runtime {

/// Separate from the collectives of training, so that a save may go on while
/// they run. All ranks call gather and broadcast in the same order, each from
/// one thread at a time. These throw RunError, which names the ranks that do
/// not come in time or have ended, and AbortedError when the run ends for
/// another reason.
class Channel {
public:
  virtual ~Channel() = default;

  virtual int64_t rank() const = 0;
  virtual int64_t worldSize() const = 0;
  /// Returns the texts of all ranks on rank 0, and nothing on the others, which
  /// do not wait.
  virtual std::vector<std::string> gather(const std::string &own) = 0;
  /// Rank 0's text, on all ranks. The others wait longer than rank 0 does in
  /// gather, so that it can say who is late.
  virtual std::string broadcast(const std::string &text) = 0;
  /// Throws AbortedError if the run ends.
  virtual void check() = 0;
  /// Makes all calls fail from now on. May be called from any thread.
  virtual void stop() = 0;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CHECKPOINT_CHANNEL_H
