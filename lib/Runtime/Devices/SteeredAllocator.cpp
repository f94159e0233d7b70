//===- SteeredAllocator.cpp - the CPU allocator of a rank -----------------===//
#include "fsdp/Runtime/Devices/SteeredAllocator.h"

#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstring>
#include <utility>

#include <malloc.h>

namespace fsdp::runtime {

namespace {

std::atomic<int64_t> currentBytes{0};
std::atomic<int64_t> peakBytes{0};
std::atomic<int64_t> allocations{0};
std::atomic<RawFree> rawFree{nullptr};

thread_local void *steeredPlace = nullptr;
thread_local size_t steeredBytes = 0;
/// By device type.
thread_local AllocationSource
    *currentSources[c10::COMPILE_TIME_MAX_DEVICE_TYPES] = {};

/// What the default allocator's block really occupies; the deleter has no
/// other way to learn a size.
int64_t blockBytes(void *block) { return int64_t(malloc_usable_size(block)); }

void release(void *block) {
  if (block && !freeRaw(block))
    freeInHeap(block);
}

class Allocator final : public c10::Allocator {
public:
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device cpu(c10::DeviceType::CPU);
    if (steeredPlace && bytes == steeredBytes) {
      void *place = steeredPlace;
      steeredPlace = nullptr;
      // No context: whoever asks for a raw pointer gets an assertion instead of
      // memory that it cannot free.
      return {place, cpu};
    }
    AllocationSource *source = currentAllocationSource(c10::DeviceType::CPU);
    if (source && bytes > 0)
      return source->allocate(bytes);
    void *block = allocateInHeap(bytes);
    return {block, block, &freeInHeap, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void *to, const void *from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

} // namespace

void installSteeredAllocator() {
  mallopt(M_TRIM_THRESHOLD, -1);
  mallopt(M_MMAP_MAX, 0);
  static Allocator allocator;
  c10::SetCPUAllocator(&allocator, /*priority=*/100);
}

SteerAllocation::SteerAllocation(void *place, size_t bytes) {
  steeredPlace = place;
  steeredBytes = bytes;
}

SteerAllocation::~SteerAllocation() { steeredPlace = nullptr; }

UseAllocationSource::UseAllocationSource(AllocationSource &source,
                                         c10::DeviceType type)
    : type(type), before(currentSources[size_t(type)]) {
  currentSources[size_t(type)] = &source;
}

UseAllocationSource::~UseAllocationSource() {
  currentSources[size_t(type)] = before;
}

UseHeap::UseHeap()
    : source(
          std::exchange(currentSources[size_t(c10::DeviceType::CPU)], nullptr)),
      place(std::exchange(steeredPlace, nullptr)) {}

UseHeap::~UseHeap() {
  currentSources[size_t(c10::DeviceType::CPU)] = source;
  steeredPlace = place;
}

AllocationSource *currentAllocationSource(c10::DeviceType type) {
  return currentSources[size_t(type)];
}

void *allocateInHeap(size_t bytes) {
  void *block =
      c10::GetDefaultCPUAllocator()->allocate(bytes).release_context();
  if (block) {
    countHeapAllocation();
    countAllocatedBytes(blockBytes(block));
  }
  return block;
}

void freeInHeap(void *block) {
  if (!block)
    return;
  currentBytes.fetch_sub(blockBytes(block), std::memory_order_relaxed);
  c10::GetDefaultCPUAllocator()->raw_deleter()(block);
}

void setRawFree(RawFree free) {
  rawFree.store(free, std::memory_order_release);
}

bool freeRaw(void *block) {
  RawFree elsewhere = rawFree.load(std::memory_order_acquire);
  return elsewhere && elsewhere(block);
}

void countHeapAllocation() {
  allocations.fetch_add(1, std::memory_order_relaxed);
}

void countAllocatedBytes(int64_t bytes) {
  int64_t now =
      currentBytes.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  int64_t peak = peakBytes.load(std::memory_order_relaxed);
  while (now > peak && !peakBytes.compare_exchange_weak(
                           peak, now, std::memory_order_relaxed)) {
  }
}

int64_t peakAllocatedBytes() {
  return peakBytes.load(std::memory_order_relaxed);
}

int64_t heapAllocations() {
  return allocations.load(std::memory_order_relaxed);
}

} // namespace fsdp::runtime
