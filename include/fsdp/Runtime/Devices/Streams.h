//===- Streams.h - in-order queues of a rank, and events between them -----===//
//
// What executes a plan's streams. The executor submits instructions in the
// order of the plan. Each stream runs its own instructions in order, and an
// instruction begins when the events that it waits for are complete.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_DEVICES_STREAMS_H
#define FSDP_RUNTIME_DEVICES_STREAMS_H

#include "fsdp/Plan/Plan.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace fsdp::runtime {

class Streams {
public:
  /// Waits for what was begun; empty if nothing was begun.
  using Wait = std::function<void()>;
  /// Executes an instruction. May return the wait for a collective that it has
  /// only begun; the instruction ends when that wait ends.
  using Work = std::function<Wait()>;

  virtual ~Streams() = default;

  /// Runs `work` on a stream, after what was submitted to it before and when
  /// the events `waits` are complete; its end completes event `records`, unless
  /// that is -1. An event refers to the last submitted work that records it;
  /// one that no work records is complete. To be called from one thread. May
  /// throw what work threw.
  virtual void submit(plan::Stream stream,
                      const std::vector<plan::EventId> &waits,
                      plan::EventId records, Work work) = 0;
  /// To be called before work that computes on the host is submitted. Returns
  /// when the host may use what the work submitted to `stream` and the events
  /// `waits` write to host memory, and may overwrite what they read from there.
  /// Does nothing where the host executes all work anyway, in the order of
  /// submit().
  virtual void awaitOnHost(plan::Stream stream,
                           const std::vector<plan::EventId> &waits) {}
  /// Returns when all work has ended; throws the first error of any.
  virtual void synchronize() = 0;
};

/// The caller's thread does everything, in the order of submission: a
/// collective on a separate stream is begun at its own position, and waited for
/// where its event is.
std::unique_ptr<Streams> makeSerialStreams();

/// How a rank executes the streams of a plan.
struct StreamSettings {
  /// If set, each stream has a thread, and one of them delays its instructions
  /// (ThreadStreamOptions); nullopt: one thread for all.
  std::optional<int64_t> maxDelayMicroseconds;
  uint64_t seed = 0; ///< of the delays
  int threads = 1;   ///< of one operator
};

struct ThreadStreamOptions {
  /// Called once on each thread before its first work.
  std::function<void()> initialise;
  /// Called once at the first error, from any thread: must make work of other
  /// threads that waits for a peer fail.
  std::function<void()> abort;
  /// One stream, chosen by `seed` modulo plan::kNumStreams, sleeps before each
  /// piece of work for a random time of at most this. So what works only by
  /// lucky timing fails.
  int64_t maxDelayMicroseconds = 0;
  uint64_t seed = 0;
};

/// A thread for each stream that is used, so that they run as a GPU's streams
/// do. After an error no further work begins, and `abort` is called.
std::unique_ptr<Streams> makeThreadStreams(ThreadStreamOptions options);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_DEVICES_STREAMS_H
