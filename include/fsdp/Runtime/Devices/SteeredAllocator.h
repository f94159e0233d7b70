//===- SteeredAllocator.h - the CPU allocator of a rank -------------------===//
//
// Forwards to ATen's default CPU allocator and counts. It can be told where to
// take memory from: one allocation of a given size from given memory, so that
// an operator writes where a collective reads, and all allocations of a thread
// from a source (RankArena.h).
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_DEVICES_STEEREDALLOCATOR_H
#define FSDP_RUNTIME_DEVICES_STEEREDALLOCATOR_H

#include <c10/core/Allocator.h>
#include <c10/core/DeviceType.h>

#include <cstddef>
#include <cstdint>

namespace fsdp::runtime {

/// Installs the allocator in this process and makes the heap keep freed memory:
/// every step allocates the same again, and faulting pages back in would cost
/// several percent of the step.
void installSteeredAllocator();

/// While alive, the first allocation of exactly `bytes` on this thread is
/// `place`, which the caller keeps valid as long as the tensor lives.
class SteerAllocation {
public:
  SteerAllocation(void *place, size_t bytes);
  SteerAllocation(const SteerAllocation &) = delete;
  SteerAllocation &operator=(const SteerAllocation &) = delete;
  ~SteerAllocation();
};

/// Where a thread's allocations come from.
class AllocationSource {
public:
  virtual ~AllocationSource() = default;
  /// Memory of `bytes` > 0; from the heap if the source has none. Its context
  /// is its address, as raw_allocate demands.
  virtual c10::DataPtr allocate(size_t bytes) = 0;
};

/// While alive, `source` serves what this thread allocates on devices of
/// `type`.
class UseAllocationSource {
public:
  explicit UseAllocationSource(AllocationSource &source,
                               c10::DeviceType type = c10::DeviceType::CPU);
  UseAllocationSource(const UseAllocationSource &) = delete;
  UseAllocationSource &operator=(const UseAllocationSource &) = delete;
  ~UseAllocationSource();

private:
  c10::DeviceType type;
  AllocationSource *before;
};

/// While alive, the heap serves what this thread allocates on the CPU, also
/// what a SteerAllocation or a UseAllocationSource around it would serve.
class UseHeap {
public:
  UseHeap();
  UseHeap(const UseHeap &) = delete;
  UseHeap &operator=(const UseHeap &) = delete;
  ~UseHeap();

private:
  AllocationSource *source;
  void *place;
};

/// What serves this thread's allocations on devices of `type`; null: their
/// heap.
AllocationSource *currentAllocationSource(c10::DeviceType type);

/// Memory of the heap, counted; `freeInHeap` frees it.
void *allocateInHeap(size_t bytes);
void freeInHeap(void *block);

/// Called when a raw pointer that is not from the heap is freed: returns true
/// if the pointer is known and is now free. May be called from any thread.
using RawFree = bool (*)(void *);
void setRawFree(RawFree free);
/// Calls the RawFree; false if none is set.
bool freeRaw(void *block);

/// Counts memory that was mapped for tensors as allocated.
void countAllocatedBytes(int64_t bytes);
/// Counts a block of another device's heap as allocated.
void countHeapAllocation();
/// The most bytes allocated at once in this process since the allocator was
/// installed, not counting steered ones.
int64_t peakAllocatedBytes();
/// Allocations that the heap served, of all threads.
int64_t heapAllocations();

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_DEVICES_STEEREDALLOCATOR_H
