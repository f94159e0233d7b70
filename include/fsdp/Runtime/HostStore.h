//===- HostStore.h - offloaded activations on the host --------------------===//
//
// One piece of the host's memory, at whose offsets the plan says where
// activations lie between forward and backward. On CPU ranks, whose device's
// memory is the host's, the copies are made all the same.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_HOSTSTORE_H
#define FSDP_RUNTIME_HOSTSTORE_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Device.h"

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
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_HOSTSTORE_H
