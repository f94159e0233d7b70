//===- ThreadStreams.cpp - a thread for each stream -----------------------===//
//
// Streams share nothing but events, so that ThreadSanitizer sees no order
// between them that the plan does not have.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Runtime/Devices/Streams.h"

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

namespace fsdp::runtime {

namespace {

class Event {
public:
  void complete() {
    done.store(true, std::memory_order_release);
    done.notify_all();
  }
  void wait() const { done.wait(false, std::memory_order_acquire); }

private:
  std::atomic<bool> done = false;
};

struct Task {
  std::vector<std::shared_ptr<Event>> waits;
  std::shared_ptr<Event> records;
  Streams::Work work;
};

/// From one thread to another.
class Queue {
public:
  void push(Task task) {
    {
      std::lock_guard guard(lock);
      tasks.push_back(std::move(task));
    }
    changed.notify_one();
  }
  /// Ends pop() when the tasks are done.
  void close() {
    {
      std::lock_guard guard(lock);
      closed = true;
    }
    changed.notify_one();
  }
  std::optional<Task> pop() {
    std::unique_lock guard(lock);
    changed.wait(guard, [&] { return closed || !tasks.empty(); });
    if (tasks.empty())
      return std::nullopt;
    Task task = std::move(tasks.front());
    tasks.pop_front();
    return task;
  }

private:
  std::mutex lock;
  std::condition_variable changed;
  std::deque<Task> tasks;
  bool closed = false;
};

class ThreadStreams final : public Streams {
public:
  explicit ThreadStreams(ThreadStreamOptions options)
      : options(std::move(options)) {}

  ~ThreadStreams() override {
    for (Queue &queue : queues)
      queue.close();
    for (std::thread &thread : threads)
      if (thread.joinable())
        thread.join();
  }

  void submit(plan::Stream stream, const std::vector<plan::EventId> &waits,
              plan::EventId records, Work work) override {
    Task task{{}, nullptr, std::move(work)};
    for (plan::EventId event : waits)
      if (size_t(event) < events.size() && events[size_t(event)])
        task.waits.push_back(events[size_t(event)]);
    if (records != -1) {
      if (size_t(records) >= events.size())
        events.resize(size_t(records) + 1);
      events[size_t(records)] = task.records = std::make_shared<Event>();
    }
    unfinished.fetch_add(1, std::memory_order_relaxed);
    queues[size_t(stream)].push(std::move(task));
    std::thread &thread = threads[size_t(stream)];
    if (!thread.joinable())
      thread = std::thread([this, stream] { run(size_t(stream)); });
  }

  void synchronize() override {
    while (int64_t left = unfinished.load(std::memory_order_acquire))
      unfinished.wait(left, std::memory_order_acquire);
    std::lock_guard guard(errorLock);
    if (error)
      std::rethrow_exception(error);
  }

private:
  void run(size_t stream) {
    std::minstd_rand random{
        std::minstd_rand::result_type(options.seed + stream + 1)};
    bool isSlow = options.seed % plan::kNumStreams == stream;
    std::uniform_int_distribution<int64_t> delay(
        0, isSlow ? options.maxDelayMicroseconds : 0);
    bool initialised = false;
    while (std::optional<Task> task = queues[stream].pop()) {
      for (const std::shared_ptr<Event> &event : task->waits)
        event->wait();
      if (!failed.load(std::memory_order_relaxed)) {
        if (int64_t pause = delay(random))
          std::this_thread::sleep_for(std::chrono::microseconds(pause));
        try {
          if (!std::exchange(initialised, true) && options.initialise)
            options.initialise();
          if (Wait begun = task->work())
            begun();
        } catch (...) {
          fail(std::current_exception());
        }
      }
      // What it holds ends before its event is complete.
      task->work = nullptr;
      if (task->records)
        task->records->complete();
      unfinished.fetch_sub(1, std::memory_order_release);
      unfinished.notify_one();
    }
  }

  void fail(std::exception_ptr cause) {
    {
      std::lock_guard guard(errorLock);
      if (error)
        return;
      error = std::move(cause);
      failed.store(true, std::memory_order_relaxed);
    }
    if (options.abort)
      options.abort();
  }

  const ThreadStreamOptions options;
  /// The last of each event; the submitting thread's, as `threads`.
  std::vector<std::shared_ptr<Event>> events;
  std::array<std::thread, plan::kNumStreams> threads;
  std::array<Queue, plan::kNumStreams> queues;
  std::atomic<int64_t> unfinished = 0;
  std::atomic<bool> failed = false;
  std::mutex errorLock;
  std::exception_ptr error;
};

} // namespace

std::unique_ptr<Streams> makeThreadStreams(ThreadStreamOptions options) {
  return std::make_unique<ThreadStreams>(std::move(options));
}

} // namespace fsdp::runtime
