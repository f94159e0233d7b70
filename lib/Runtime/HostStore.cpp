//===- HostStore.cpp - offloaded activations on the host ------------------===//
#include "fsdp/Runtime/HostStore.h"
#include "fsdp/Runtime/Error.h"

#include <ATen/ops/empty.h>

#include <cerrno>
#include <cstring>

#include <sys/mman.h>

namespace fsdp::runtime {

HostStore::HostStore(const plan::Plan &plan) : plan(plan) {
  for (const plan::Instruction &instruction : plan.instructions)
    if (const auto *offload =
            std::get_if<plan::OffloadActivation>(&instruction.kind))
      copies[offload->out];
  if (!plan.hostArena || plan.hostArena->bytes == 0)
    return;
  mappedBytes = size_t(plan.hostArena->bytes);
  void *mapped = mmap(nullptr, mappedBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED)
    throw RunError("cannot map " + std::to_string(mappedBytes) +
                   " bytes for offloaded activations: " + std::strerror(errno));
  base = static_cast<std::byte *>(mapped);
}

HostStore::~HostStore() {
  if (base)
    munmap(base, mappedBytes);
}

std::byte *HostStore::placeOf(plan::ValueId value, Copy &copy) {
  const plan::Value &entry = plan.values[value];
  if (base && entry.offset != -1 && int64_t(copy.bytes) <= entry.numBytes())
    return base + entry.offset;
  copy.own.resize(copy.bytes);
  return copy.own.data();
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
  std::memcpy(placeOf(offload.out, copy), storage.data(), copy.bytes);
}

void HostStore::reload(const plan::ReloadActivation &reload,
                       std::vector<at::Tensor> &values) {
  Copy &copy = copies.at(reload.host);
  // Of the microbatch before, where the plan does not free it.
  for (plan::ValueId out : reload.outs)
    values[out].reset();
  at::Tensor bytes = at::empty({int64_t(copy.bytes)}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), placeOf(reload.host, copy), copy.bytes);
  for (size_t i = 0; i < reload.outs.size(); ++i) {
    const View &view = copy.views[i];
    auto impl = c10::make_intrusive<c10::TensorImpl>(
        c10::Storage(bytes.storage()),
        c10::DispatchKeySet(c10::DispatchKey::CPU), view.dtype);
    impl->set_sizes_and_strides(view.sizes, view.strides, view.offset);
    values[reload.outs[i]] = at::Tensor(std::move(impl));
  }
}

} // namespace fsdp::runtime
