//===- Device.h - where a rank computes -----------------------------------===//
//
// All that the runtime asks of a device: memory at fixed addresses, streams,
// copies and a random generator. Everything else is ATen's, which picks the
// kernel by a tensor's device.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_DEVICES_DEVICE_H
#define FSDP_RUNTIME_DEVICES_DEVICE_H

#include "fsdp/Runtime/Devices/Streams.h"
#include "fsdp/Runtime/Devices/Timer.h"

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/util/UniqueVoidPtr.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace fsdp::runtime {

/// A range of addresses that does not move, of which a beginning has memory.
class DeviceMemory {
public:
  /// Gives back memory and addresses.
  virtual ~DeviceMemory() = default;
  /// A multiple of 2 MiB.
  virtual std::byte *base() const = 0;
  /// Of the range.
  virtual size_t bytes() const = 0;
  /// Puts memory behind the first `bytes`, if there is none yet. Throws
  /// RunError where the device has no more.
  virtual void back(size_t bytes) = 0;
};

/// Work that a device repeats without the host, on the memory on which it was
/// captured: a CUDA graph.
class DeviceGraph {
public:
  virtual ~DeviceGraph() = default;
  /// On the thread's current stream.
  virtual void replay() = 0;
};

class Device {
public:
  virtual ~Device() = default;

  virtual c10::Device where() const = 0;
  /// Of a GPU: "sm_90". Empty for the CPU.
  virtual std::string architecture() const { return {}; }
  /// A range of at least `bytes`, with no memory behind it. Throws RunError.
  virtual std::unique_ptr<DeviceMemory> reserve(size_t bytes) = 0;
  /// The same on the host, where the device's copies are fastest, with memory
  /// behind all of it.
  virtual std::unique_ptr<DeviceMemory> reserveHost(size_t bytes) = 0;
  /// Copies between any of the device's and the host's memory. On CUDA in the
  /// order of the thread's current stream: host memory stays until then.
  virtual void copy(void *to, const void *from, size_t bytes) = 0;
  /// Memory outside of any range, counted by heapAllocations(), and what frees
  /// it, also when the Device is gone.
  virtual void *allocate(size_t bytes) = 0;
  virtual c10::DeleterFnPtr deleter() const = 0;
  /// Seeds the default generator of the device.
  virtual void seed(uint64_t seed) = 0;
  /// That generator.
  virtual at::Generator generator() = 0;
  /// Those that execute a plan.
  virtual std::unique_ptr<Streams> makeStreams() = 0;
  /// Captures what `work` submits to streams that begin and end with the
  /// thread's current one; it is not executed. Null where the device has no
  /// graphs. Throws where something cannot be captured.
  virtual std::unique_ptr<DeviceGraph>
  capture(const std::function<void()> &work) {
    return nullptr;
  }
  /// Within capture.
  virtual bool isCapturing() const { return false; }
  /// Of so many marks; without a clock of the device's own, the host's.
  virtual std::unique_ptr<Timer> makeTimer(size_t marks) {
    return std::make_unique<HostTimer>(marks);
  }
  /// Marks what the thread submits until the matching end, for profilers.
  virtual void beginRange(const char *name) {}
  virtual void endRange() {}
  /// Waits for all that was begun on the device; throws its errors.
  virtual void synchronize() = 0;
};

/// The host. One thread executes all streams.
std::unique_ptr<Device> makeCpuDevice();

/// The index-th GPU of this process. Throws InputError where there is none, or
/// where this program was built without CUDA.
std::unique_ptr<Device> makeCudaDevice(int index);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_DEVICES_DEVICE_H
