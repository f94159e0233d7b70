//===- HostStore.h - what a step copies to the host -----------------------===//
//
// Memory of the host, in which activations lie between forward and backward, at
// offsets of the plan, and gradients of offloaded units until the optimizer has
// used them, each at a place of its own. On CPU ranks, whose device's memory is
// the host's, the copies are made all the same.
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

/// Streams may offload and reload different values at a time.
class HostStore {
public:
  /// Borrows plan and device. Throws RunError where there is not enough memory.
  HostStore(const plan::Plan &plan, Device &device);

  /// Copies the storage of `ins` of `values`. Throws RunError if they do not
  /// share one.
  void offload(const plan::OffloadActivation &offload,
               const std::vector<at::Tensor> &values);
  /// Sets `outs` of `values`: as they were, of one new storage.
  void reload(const plan::ReloadActivation &reload,
              std::vector<at::Tensor> &values);
  /// Sets `outs` of `values`, to copies of `ins` on the host, which their next
  /// overwrite. Where the plan has places for them in the arena of a CPU rank,
  /// they are there.
  void copyGradients(const plan::CopyToHost &copy,
                     std::vector<at::Tensor> &values);
  /// Whether a gradient has its place there.
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
    /// Where the plan gives it no place, or one that is too small.
    std::unique_ptr<DeviceMemory> own;
  };
  std::byte *placeOf(plan::ValueId value, Copy &copy);

  const plan::Plan &plan;
  /// Of every value on the host, from the beginning.
  std::unordered_map<plan::ValueId, Copy> copies;
  Device &device;
  /// Null where the plan has no places on the host.
  std::unique_ptr<DeviceMemory> memory;
  /// Null where there are none here.
  std::unique_ptr<DeviceMemory> gradients;
  /// In `gradients`, of every value of one.
  std::unordered_map<plan::ValueId, int64_t> gradientOffsets;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_MEMORY_HOSTSTORE_H
