//===- CudaModule.h - what is loaded when a GPU is asked for --------------===//
//
// libtorch_cuda is a gigabyte, and mapping it takes longer than a small run.
// So everything that needs CUDA or NCCL is in a shared library of its own,
// libfsdp_cuda.so in ../lib beside the program, and nothing else depends on it.
//
// The library exports one function, fsdpCudaModule, and is linked without
// undefined symbols. The runtime is a static library, in a program or in a
// Python module: what has state there (the allocator's counts, a thread's
// source) must not exist twice, so the library gets it as a CudaHost.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_DEVICES_CUDAMODULE_H
#define FSDP_RUNTIME_DEVICES_CUDAMODULE_H

#include "fsdp/Runtime/Devices/Device.h"
#include "fsdp/Runtime/Devices/FlatLayout.h"
#include "fsdp/Runtime/Devices/SteeredAllocator.h"

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>

namespace c10d {
class Store;
} // namespace c10d

namespace fsdp::runtime {

class Transport;
struct NcclOptions;

/// The functions of SteeredAllocator.h, as the program has them.
struct CudaHost {
  AllocationSource *(*allocationSource)(c10::DeviceType type);
  bool (*freeRaw)(void *block);
  void (*countAllocatedBytes)(int64_t bytes);
  void (*countHeapAllocation)();
};

class CudaModule {
public:
  virtual ~CudaModule() = default;

  /// makeCudaDevice.
  virtual std::unique_ptr<Device> makeDevice(int index) const = 0;
  /// makeNcclTransport.
  virtual std::unique_ptr<Transport>
  makeTransport(const c10::intrusive_ptr<c10d::Store> &store, int64_t rank,
                int64_t worldSize, int gpu,
                const NcclOptions &options) const = 0;
  /// Copies all tiles of a table whose memory is on the current device, on the
  /// current stream, in one launch.
  virtual void copyFlat(const FlatTable &table, FlatElement flat,
                        FlatElement tensor, FlatDirection direction) const = 0;
};

/// Loads the library at the first call. Throws InputError if it is missing or
/// cannot be loaded, or if something asked ATen about CUDA before: ATen then
/// takes CUDA for absent until the process ends. So a program that wants a GPU
/// must call this, or makeCudaDevice, first; one that has imported `torch` need
/// not.
const CudaModule &cudaModule();

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_DEVICES_CUDAMODULE_H
