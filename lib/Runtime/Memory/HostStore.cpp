//===- HostStore.cpp - what a step copies to the host ---------------------===//
#include "fsdp/Runtime/Memory/HostStore.h"
#include "fsdp/Plan/Memory.h"
#include "fsdp/Runtime/Error.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

namespace fsdp::runtime {

HostStore::HostStore(const plan::Plan &plan, Device &device)
    : plan(plan), device(device) {
  int64_t gradientBytes = 0;
  for (const plan::Instruction &instruction : plan.instructions) {
    if (const auto *offload =
            std::get_if<plan::OffloadActivation>(&instruction.kind))
      copies[offload->out];
    const auto *copy = std::get_if<plan::CopyToHost>(&instruction.kind);
    if (!copy)
      continue;
    for (plan::ValueId out : copy->outs) {
      const plan::Value &value = plan.values[out];
      bool placed = device.where().is_cpu() && value.offset != -1;
      if (placed || value.numBytes() == 0)
        continue;
      gradientOffsets[out] = gradientBytes;
      // No rank's shard is larger than the first one's, which the plan has.
      gradientBytes += plan::alignTo(value.numBytes());
    }
  }
  if (gradientBytes > 0)
    gradients = device.reserveHost(size_t(gradientBytes));
  if (plan.hostArena && plan.hostArena->bytes > 0)
    memory = device.reserveHost(size_t(plan.hostArena->bytes));
}

std::byte *HostStore::placeOf(plan::ValueId value, Copy &copy) {
  const plan::Value &entry = plan.values[value];
  if (memory && entry.offset != -1 && int64_t(copy.bytes) <= entry.numBytes())
    return memory->base() + entry.offset;
  if (!copy.own || copy.own->bytes() < copy.bytes)
    copy.own = device.reserveHost(copy.bytes);
  return copy.own->base();
}

void HostStore::offload(const plan::OffloadActivation &offload,
                        const std::vector<at::Tensor> &values) {
  Copy &copy = copies.at(offload.out);
  const at::Storage &storage = values[offload.ins.front()].storage();
  copy.bytes = storage.nbytes();
  copy.views.resize(offload.ins.size());
  for (size_t i = 0; i < offload.ins.size(); ++i) {
    const at::Tensor &value = values[offload.ins[i]];
    if (value.storage().data() != storage.data())
      throw RunError("expected activations of one storage, got two");
    View &view = copy.views[i];
    view.sizes.assign(value.sizes().begin(), value.sizes().end());
    view.strides.assign(value.strides().begin(), value.strides().end());
    view.offset = value.storage_offset();
    view.dtype = value.dtype();
  }
  device.copy(placeOf(offload.out, copy), storage.data(), copy.bytes);
}

void HostStore::reload(const plan::ReloadActivation &reload,
                       std::vector<at::Tensor> &values) {
  Copy &copy = copies.at(reload.host);
  // Of the microbatch before, where the plan does not free it.
  for (plan::ValueId out : reload.outs)
    values[out].reset();
  at::Tensor bytes = at::empty({int64_t(copy.bytes)},
                               at::dtype(at::kByte).device(device.where()));
  device.copy(bytes.mutable_data_ptr(), placeOf(reload.host, copy), copy.bytes);
  for (size_t i = 0; i < reload.outs.size(); ++i) {
    const View &view = copy.views[i];
    auto impl = c10::make_intrusive<c10::TensorImpl>(
        c10::Storage(bytes.storage()), bytes.key_set(), view.dtype);
    impl->set_sizes_and_strides(view.sizes, view.strides, view.offset);
    values[reload.outs[i]] = at::Tensor(std::move(impl));
  }
}

void HostStore::copyGradients(const plan::CopyToHost &copy,
                              std::vector<at::Tensor> &values) {
  for (size_t i = 0; i < copy.ins.size(); ++i) {
    at::Tensor from = values[copy.ins[i]].contiguous();
    at::Tensor &to = values[copy.outs[i]];
    to.reset(); // of the microbatch before, where the plan does not free it
    auto place = gradientOffsets.find(copy.outs[i]);
    at::TensorOptions options = at::dtype(from.dtype());
    to = place == gradientOffsets.end()
             ? at::empty(from.sizes(), options)
             : at::from_blob(gradients->base() + place->second, from.sizes(),
                             options);
    if (from.numel() > 0)
      device.copy(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
  }
}

bool HostStore::holds(const void *address) const {
  auto *at = static_cast<const std::byte *>(address);
  return gradients && at >= gradients->base() &&
         at < gradients->base() + gradients->bytes();
}

} // namespace fsdp::runtime
