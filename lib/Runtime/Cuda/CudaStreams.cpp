//===- CudaStreams.cpp - a plan's streams as streams of a GPU -------------===//
#include "CudaStreams.h"
#include "CudaError.h"
#include "SteeredCudaAllocator.h"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cuda_runtime_api.h>

#include <array>
#include <utility>

namespace fsdp::runtime {

namespace {

/// Recorded again and again: what waits for it waits for the last record before
/// the wait was submitted.
class Event {
public:
  Event() {
    checkCuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
              "create an event");
  }
  Event(const Event &) = delete;
  Event &operator=(const Event &) = delete;
  ~Event() { (void)cudaEventDestroy(event); }

  void record(cudaStream_t stream) {
    checkCuda(cudaEventRecord(event, stream), "record an event");
  }
  void awaitOnHost() const {
    checkCuda(cudaEventSynchronize(event), "finish what the host waits for");
  }
  void makeWait(cudaStream_t stream) const {
    checkCuda(cudaStreamWaitEvent(stream, event), "wait for an event");
  }

private:
  cudaEvent_t event = nullptr;
};

class CudaStreams final : public Streams {
public:
  explicit CudaStreams(int index) : index(c10::DeviceIndex(index)) {}

  void submit(plan::Stream stream, const std::vector<plan::EventId> &waits,
              plan::EventId records, Work work) override {
    c10::cuda::CUDAStream queue = follow(stream);
    makeWait(queue, waits);
    c10::cuda::CUDAStreamGuard guard(queue);
    // A collective that waits on the host does so before its event.
    if (Wait begun = work())
      begun();
    if (records == -1)
      return;
    if (size_t(records) >= events.size())
      events.resize(size_t(records) + 1);
    PlanEvent &event = events[size_t(records)];
    if (!event.event)
      event.event = std::make_unique<Event>();
    event.event->record(queue);
    event.isRecorded = true;
  }

  void awaitOnHost(plan::Stream stream,
                   const std::vector<plan::EventId> &waits) override {
    c10::cuda::CUDAStream queue = follow(stream);
    makeWait(queue, waits);
    host.record(queue);
    host.awaitOnHost();
  }

  void synchronize() override {
    c10::cuda::CUDAStream current = c10::cuda::getCurrentCUDAStream(index);
    for (Queue &queue : queues)
      if (std::exchange(queue.follows, false) && *queue.stream != current) {
        queue.end->record(*queue.stream);
        queue.end->makeWait(current);
      }
    // What is submitted next follows `current`, and so all of this: no event of
    // before need be waited for, which a graph could not either.
    for (PlanEvent &event : events)
      event.isRecorded = false;
  }

private:
  struct Queue {
    std::optional<c10::cuda::CUDAStream> stream;
    std::unique_ptr<Event> end;
    bool follows = false; ///< was used since synchronize()
  };
  struct PlanEvent {
    std::unique_ptr<Event> event;
    bool isRecorded = false; ///< since synchronize()
  };

  void makeWait(c10::cuda::CUDAStream queue,
                const std::vector<plan::EventId> &waits) const {
    for (plan::EventId id : waits)
      if (size_t(id) < events.size() && events[size_t(id)].isRecorded)
        events[size_t(id)].event->makeWait(queue);
  }

  c10::cuda::CUDAStream follow(plan::Stream stream) {
    Queue &queue = queues[size_t(stream)];
    if (!queue.stream) {
      // Communication first, where both could run: compute waits for it.
      queue.stream = c10::cuda::getStreamFromPool(
          /*isHighPriority=*/stream != plan::Stream::Compute, index);
      queue.end = std::make_unique<Event>();
      keepMemoryForStream(*queue.stream);
    }
    if (!std::exchange(queue.follows, true)) {
      c10::cuda::CUDAStream current = c10::cuda::getCurrentCUDAStream(index);
      keepMemoryForStream(current);
      if (*queue.stream != current) {
        begin.record(current);
        begin.makeWait(*queue.stream);
      }
    }
    return *queue.stream;
  }

  const c10::DeviceIndex index;
  std::array<Queue, plan::kNumStreams> queues;
  std::vector<PlanEvent> events; ///< by EventId
  Event begin;                   ///< of the caller's stream
  Event host;                    ///< what the host waits for
};

} // namespace

std::unique_ptr<Streams> makeCudaStreams(int index) {
  return std::make_unique<CudaStreams>(index);
}

} // namespace fsdp::runtime
