//===- HostStore.h - what a step copies to the host -----------------------===//
//
// Host memory for activations between forward and backward, at offsets of the
// plan, and for gradients of offloaded units until the optimizer has used them,
// each at its own place. CPU ranks, whose device memory is the host's, make the
// same copies.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_MEMORY_HOSTSTORE_H
#define FSDP_RUNTIME_MEMORY_HOSTSTORE_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Devices/Device.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <unordered_map>
#include <vector>

namespace fsdp::runtime {

/// Streams may offload and reload different values concurrently.
class HostStore {
public:
  /// Borrows plan and device. Throws RunError where there is not enough memory.
  HostStore(const plan::Plan &plan, Device &device);

  /// Copies the storage of `ins` of `values`. Throws RunError if they do not
  /// share one.
  void offload(const plan::OffloadActivation &offload,
               const std::vector<at::Tensor> &values);
  /// Sets `outs` of `values` to what was offloaded, in one new storage.
  void reload(const plan::ReloadActivation &reload,
              std::vector<at::Tensor> &values);
  /// Sets `outs` of `values` to copies of `ins` on the host, which the next
  /// copies of the same gradients overwrite. If the plan has places for them in
  /// the arena of a CPU rank, they lie there.
  void copyGradients(const plan::CopyToHost &copy,
                     std::vector<at::Tensor> &values);
  /// Whether the address is the place of a gradient here.
  bool holds(const void *address) const;

private:
  /// How a tensor lies in its storage.
  struct View {
    std::vector<int64_t> sizes, strides;
    int64_t offset = 0;
    caffe2::TypeMeta dtype;
  };
  /// What a value on the host holds.
  struct Copy {
    std::vector<View> views;
    size_t bytes = 0;
    /// Used if the plan gives the value no place, or one that is too small.
    std::unique_ptr<DeviceMemory> own;
  };
  std::byte *placeOf(plan::ValueId value, Copy &copy);

  const plan::Plan &plan;
  /// Of every value on the host, from the beginning.
  std::unordered_map<plan::ValueId, Copy> copies;
  Device &device;
  /// Null where the plan has no places on the host.
  std::unique_ptr<DeviceMemory> memory;
  /// Null if there are none here.
  std::unique_ptr<DeviceMemory> gradients;
  /// In `gradients`, of every value of one.
  std::unordered_map<plan::ValueId, int64_t> gradientOffsets;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_MEMORY_HOSTSTORE_H
