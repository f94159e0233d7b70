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
#include <vector>

namespace fsdp::runtime {

/// A fixed range of addresses, whose beginning is backed by memory.
class DeviceMemory {
public:
  /// Gives back memory and addresses.
  virtual ~DeviceMemory() = default;
  /// A multiple of 2 MiB.
  virtual std::byte *base() const = 0;
  /// Of the range.
  virtual size_t bytes() const = 0;
  /// Puts memory behind the first `bytes`, if there is none yet. Throws
  /// RunError if the device has no more memory.
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

/// A function that a device has been given (KernelAbi.h).
class DeviceKernel {
public:
  virtual ~DeviceKernel() = default;
  /// Submits `trips` trips on these tensors to the thread's current stream.
  virtual void launch(const std::vector<void *> &tensors, int64_t trips) = 0;
};

class Device {
public:
  virtual ~Device() = default;

  virtual c10::Device where() const = 0;
  /// Of a GPU: "sm_90". Empty for the CPU.
  virtual std::string architecture() const { return {}; }
  /// The alignment of the memory that PyTorch's allocator gives out on it, in
  /// bytes. Libraries choose kernels by it, and with them the bits: cuBLAS by
  /// that of its workspace.
  virtual size_t alignment() const { return 64; }
  /// Loads the code of a kernel that was compiled for `architecture()`. Throws
  /// RunError if the device does not take it. Null on the CPU, which runs code
  /// by itself (KernelImages).
  virtual std::unique_ptr<DeviceKernel> loadKernel(const std::string &code) {
    return nullptr;
  }
  /// A range of at least `bytes`, with no memory behind it. Throws RunError.
  virtual std::unique_ptr<DeviceMemory> reserve(size_t bytes) = 0;
  /// The same on the host, where the device's copies are fastest, with memory
  /// behind all of it.
  virtual std::unique_ptr<DeviceMemory> reserveHost(size_t bytes) = 0;
  /// Copies between any of the device's and the host's memory. On CUDA the copy
  /// is ordered by the thread's current stream: host memory must stay valid
  /// until then.
  virtual void copy(void *to, const void *from, size_t bytes) = 0;
  /// Memory outside any range, counted by heapAllocations(), and the function
  /// that frees it, even when the Device is gone.
  virtual void *allocate(size_t bytes) = 0;
  virtual c10::DeleterFnPtr deleter() const = 0;
  /// Seeds the default generator of the device.
  virtual void seed(uint64_t seed) = 0;
  /// That generator.
  virtual at::Generator generator() = 0;
  /// Makes the streams that execute a plan.
  virtual std::unique_ptr<Streams> makeStreams() = 0;
  /// Captures what `work` submits to streams that fork from the thread's
  /// current stream and join it again; nothing is executed. Null if the device
  /// has no graphs. Throws if something cannot be captured.
  virtual std::unique_ptr<DeviceGraph>
  capture(const std::function<void()> &work) {
    return nullptr;
  }
  /// Whether a capture is in progress.
  virtual bool isCapturing() const { return false; }
  /// A timer with so many marks; it uses the host's clock if the device has
  /// none of its own.
  virtual std::unique_ptr<Timer> makeTimer(size_t marks) {
    return std::make_unique<HostTimer>(marks);
  }
  /// Names, for profilers, what the thread submits until the matching end.
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
