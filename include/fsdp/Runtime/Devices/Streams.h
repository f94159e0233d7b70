//===- Streams.h - in-order queues of a rank, and events between them -----===//
//
// What executes a plan's streams. The executor submits instructions in the
// order of the plan; the streams run them, each its own in order, and let one
// begin when the events that it waits for are complete.
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
  /// Waits for what was begun; empty: nothing was.
  using Wait = std::function<void()>;
  /// Executes an instruction. May return the wait for a collective that it
  /// has only begun; the instruction ends with that.
  using Work = std::function<Wait()>;

  virtual ~Streams() = default;

  /// Runs `work` on a stream, after what was submitted to it before and when
  /// the events `waits` are complete; its end completes event `records`, unless
  /// that is -1. An event is that of the last work submitted that records it;
  /// one that none records is complete. From one thread. May throw what work
  /// threw.
  virtual void submit(plan::Stream stream,
                      const std::vector<plan::EventId> &waits,
                      plan::EventId records, Work work) = 0;
  /// Before work is submitted that computes on the host: returns when the host
  /// may use what was submitted to `stream` and the events `waits` bring to its
  /// memory, and may overwrite what they take from there. Nothing to do where
  /// work is executed by the host in any case, in the order of submit().
  virtual void awaitOnHost(plan::Stream stream,
                           const std::vector<plan::EventId> &waits) {}
  /// Returns when all work has ended; throws the first error of any.
  virtual void synchronize() = 0;
};

/// One thread does everything, the caller's, in the order of submission: a
/// collective on a stream of its own is begun where it stands, and waited for
/// where its event is.
std::unique_ptr<Streams> makeSerialStreams();

/// How a rank executes the streams of a plan.
struct StreamSettings {
  /// A thread for each stream, of which one delays its instructions
  /// (ThreadStreamOptions); nullopt: one thread for all.
  std::optional<int64_t> maxDelayMicroseconds;
  uint64_t seed = 0; ///< of the delays
  int threads = 1;   ///< of one operator
};

struct ThreadStreamOptions {
  /// Called once on each thread before its first work.
  std::function<void()> initialise;
  /// Called once at the first error, from any thread: makes work of other
  /// threads that waits for a peer fail.
  std::function<void()> abort;
  /// One stream, chosen by `seed` modulo plan::kNumStreams, sleeps before each
  /// work for a random time of at most this: what works only by the luck of
  /// timing does not then.
  int64_t maxDelayMicroseconds = 0;
  uint64_t seed = 0;
};

/// A thread for each stream that is used, as streams of a GPU run. After an
/// error no further work begins, and `abort` is called.
std::unique_ptr<Streams> makeThreadStreams(ThreadStreamOptions options);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_DEVICES_STREAMS_H
