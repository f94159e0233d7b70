//===- CudaTimer.cpp - when a GPU gets where ------------------------------===//
#include "CudaTimer.h"
#include "CudaError.h"

#include <c10/cuda/CUDAStream.h>

#include <cuda_runtime_api.h>

namespace fsdp::runtime {

namespace {

class Event {
public:
  Event() { checkCuda(cudaEventCreate(&event), "create an event"); }
  Event(const Event &) = delete;
  Event &operator=(const Event &) = delete;
  ~Event() { (void)cudaEventDestroy(event); }

  void record(int gpu) {
    checkCuda(cudaEventRecord(event, c10::cuda::getCurrentCUDAStream(
                                         c10::DeviceIndex(gpu))),
              "record an event");
  }
  double secondsSince(const Event &other) const {
    float milliseconds = 0;
    checkCuda(cudaEventElapsedTime(&milliseconds, other.event, event),
              "read the time between two events");
    return double(milliseconds) * 1e-3;
  }

private:
  cudaEvent_t event = nullptr;
};

class CudaTimer final : public Timer {
public:
  CudaTimer(int index, size_t marks) : index(index), events(marks) {}

  void start() override { zero.record(index); }
  void mark(size_t mark) override { events[mark].record(index); }
  double seconds(size_t mark) const override {
    return events[mark].secondsSince(zero);
  }

private:
  const int index;
  Event zero;
  std::vector<Event> events;
};

} // namespace

std::unique_ptr<Timer> makeCudaTimer(int index, size_t marks) {
  return std::make_unique<CudaTimer>(index, marks);
}

} // namespace fsdp::runtime
