//===- SteeredAllocator.h - the CPU allocator of a rank -------------------===//
//
// Forwards to ATen's default CPU allocator and counts bytes. It can be told to
// serve one allocation of a given size from given memory: operators that
// allocate their result can so be made to write where a collective reads.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_STEEREDALLOCATOR_H
#define FSDP_RUNTIME_STEEREDALLOCATOR_H

#include <cstddef>
#include <cstdint>

namespace fsdp::runtime {

/// Installs the allocator in this process and keeps what the heap frees: every
/// step allocates the same again, and faulting pages back in would cost
/// several percent of it.
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

/// Most bytes allocated at once in this process since the allocator was
/// installed, steered ones not counted.
int64_t peakAllocatedBytes();

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_STEEREDALLOCATOR_H
