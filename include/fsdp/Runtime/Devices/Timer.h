//===- Timer.h - when a device gets where ---------------------------------===//
#ifndef FSDP_RUNTIME_DEVICES_TIMER_H
#define FSDP_RUNTIME_DEVICES_TIMER_H

#include <chrono>
#include <cstddef>
#include <vector>

namespace fsdp::runtime {

/// Marks in a device's work, all on one clock. Setting a mark allocates no
/// memory and does not wait. It may be done on any thread, for each mark on one
/// thread at a time.
class Timer {
public:
  virtual ~Timer() = default;
  /// Sets time zero: the point that the device has reached in the thread's
  /// current work.
  virtual void start() = 0;
  /// Sets a mark at that point, on a GPU in the thread's current stream.
  virtual void mark(size_t index) = 0;
  /// From start() to a mark, which was set and which the device has passed.
  virtual double seconds(size_t index) const = 0;
};

/// The host's clock.
class HostTimer final : public Timer {
public:
  explicit HostTimer(size_t marks) : marks(marks) {}
  void start() override { zero = Clock::now(); }
  void mark(size_t index) override { marks[index] = Clock::now(); }
  double seconds(size_t index) const override {
    return std::chrono::duration<double>(marks[index] - zero).count();
  }

private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point zero;
  std::vector<Clock::time_point> marks;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_DEVICES_TIMER_H
