//===- SessionState.cpp - a session's tensors, as checkpoints have them ---===//
#include "fsdp/Runtime/Launch/SessionState.h"
#include "fsdp/Runtime/Devices/SteeredAllocator.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Files/SafeTensors.h"
#include "fsdp/Runtime/Memory/Layout.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <memory>

namespace fsdp::runtime {

namespace {

Chunk wholeOf(const std::vector<int64_t> &shape) {
  return {std::vector<int64_t>(shape.size(), 0), shape};
}

} // namespace

SessionState::Item SessionState::paramItem(int32_t index) const {
  const plan::Param &param = plan.params[size_t(index)];
  Item item{param.name, param.spec, wholeOf(param.spec.shape),
            session.comm().shard(index)};
  item.unit = param.unit;
  if (param.unit == -1) {
    item.isOwn = true;
    return item;
  }
  plan::RowRange rows =
      plan::shardRows(param.spec.shape[size_t(param.shardDim)], plan.shards(),
                      session.comm().shardIndex());
  item.chunk.offsets[size_t(param.shardDim)] = rows.begin;
  item.chunk.sizes[size_t(param.shardDim)] = rows.size();
  return item;
}

std::vector<SessionState::Item> SessionState::modelItems() const {
  std::vector<Item> items;
  for (size_t p = 0; p < plan.params.size(); ++p)
    items.push_back(paramItem(int32_t(p)));
  for (size_t b = 0; b < plan.buffers.size(); ++b) {
    const plan::Buffer &buffer = plan.buffers[b];
    items.push_back({buffer.name, buffer.spec, wholeOf(buffer.spec.shape),
                     session.buffers()[b], /*isOwn=*/true});
  }
  return items;
}

std::vector<SessionState::Item> SessionState::optimizerItems() const {
  std::vector<Item> items;
  for (size_t p = 0; p < plan.params.size(); ++p) {
    Item param = paramItem(int32_t(p));
    for (const auto &[name, tensor] : session.optimizerState(int32_t(p))) {
      Item item = param;
      item.name = "optimizer.state." + param.name + "." + name;
      item.tensor = tensor;
      item.spec.dtype = planType(tensor.scalar_type());
      if (tensor.sizes() != param.tensor.sizes()) {
        item.spec.shape = tensor.sizes().vec();
        item.chunk = wholeOf(item.spec.shape);
        item.isOwn = false;
        item.isShared = true;
      }
      items.push_back(std::move(item));
    }
  }
  return items;
}

std::vector<std::pair<std::string, at::Generator>>
SessionState::generators() const {
  int64_t rank = session.comm().rank();
  std::vector<std::pair<std::string, at::Generator>> result = {
      {ownName(rank, "rng.cpu"), at::detail::getDefaultCPUGenerator()}};
  if (!device.where().is_cpu())
    result.emplace_back(ownName(rank, "rng.device"), device.generator());
  return result;
}

std::vector<int64_t>
SessionState::writers(const std::vector<Item> &items) const {
  std::vector<int64_t> bytes(size_t(plan.replicas), 0), result;
  for (const Item &item : items) {
    auto least = std::min_element(bytes.begin(), bytes.end());
    result.push_back(least - bytes.begin());
    if (!item.isOwn && !item.isShared)
      *least += item.spec.numBytes();
  }
  return result;
}

void SessionState::stage(std::vector<ShardTensor> &to, const Item &item,
                         bool copies, bool later) {
  ShardTensor result{item.name, item.spec, item.chunk, {}};
  at::Tensor tensor = item.tensor;
  if (copies || !tensor.is_cpu()) {
    at::Tensor copy =
        at::from_blob(staging->base() + staged, tensor.sizes(),
                      at::TensorOptions().dtype(tensor.scalar_type()));
    if (later)
      postponed[item.unit].push_back({copy, tensor});
    else
      copy.copy_(tensor);
    staged += plan::alignTo(tensor.nbytes());
    tensor = copy;
  } else {
    tensor = tensor.contiguous();
    kept.push_back(tensor);
  }
  result.data = {static_cast<const std::byte *>(tensor.const_data_ptr()),
                 tensor.nbytes()};
  to.push_back(std::move(result));
}

void SessionState::stage(SaveRequest &request, bool copies,
                         const std::set<int32_t> &later) {
  std::vector<Item> items = modelItems();
  std::vector<Item> more = optimizerItems();
  items.insert(items.end(), more.begin(), more.end());
  int64_t rank = session.comm().rank(), replica = plan.replicaIndex(rank);
  std::vector<int64_t> writer = writers(items);
  std::vector<Item> chosen;
  for (size_t i = 0; i < items.size(); ++i) {
    Item &item = items[i];
    if (item.isShared && rank != 0)
      continue;
    // A tensor without elements is still in one file.
    bool isPart = item.tensor.numel() > 0 || (item.spec.numElements() == 0 &&
                                              session.comm().shardIndex() == 0);
    if (!item.isOwn && !item.isShared && (writer[i] != replica || !isPart))
      continue;
    chosen.push_back(std::move(item));
  }
  for (const auto &[name, generator] : generators()) {
    at::Tensor state = generator.get_state();
    plan::TensorSpec spec{state.sizes().vec(), plan::DType::UInt8};
    chosen.push_back({name, spec, wholeOf(spec.shape), state});
  }
  size_t bytes = 0;
  for (const Item &item : chosen)
    if (copies || !item.tensor.is_cpu())
      bytes += plan::alignTo(item.tensor.nbytes());
  if (bytes > 0 && (!staging || staging->bytes() < bytes)) {
    if (staging)
      countAllocatedBytes(-int64_t(staging->bytes()));
    staging.reset();
    staging = device.reserveHost(bytes);
    countAllocatedBytes(int64_t(staging->bytes()));
  }
  staged = 0;
  kept.clear();
  postponed.clear();
  for (const Item &item : chosen)
    stage(item.isOwn ? request.own : request.chunks, item, copies,
          later.contains(item.unit));
  device.synchronize();
}

Interpreter::Wait SessionState::copyUnit(int32_t unit) {
  auto found = postponed.extract(unit);
  if (found.empty())
    return {};
  auto copies = std::make_shared<std::vector<Copy>>(std::move(found.mapped()));
  if (!device.where().is_cpu()) {
    for (const Copy &copy : *copies)
      copy.to.copy_(copy.from, /*non_blocking=*/true);
    return {};
  }
  // Runs beside the rank's own thread, which computes meanwhile.
  auto done = std::make_shared<std::future<void>>(
      std::async(std::launch::async, [copies] {
        c10::InferenceMode guard;
        for (const Copy &copy : *copies)
          if (copy.from.is_contiguous())
            std::memcpy(copy.to.mutable_data_ptr(), copy.from.const_data_ptr(),
                        copy.from.nbytes());
          else
            copy.to.copy_(copy.from);
      }));
  return [done] { done->get(); };
}

void SessionState::read(const NativeCheckpoint &checkpoint,
                        const Item &item) const {
  std::string name = item.name;
  if (item.isOwn) {
    std::string own = ownName(session.comm().rank(), name);
    if (checkpoint.has(own))
      name = own;
  }
  if (!checkpoint.has(name))
    throw InputError(checkpoint.path() + ": no tensor \"" + name +
                     "\", which the plan has");
  const plan::TensorSpec &saved = checkpoint.manifest().tensors.at(name);
  if (saved != item.spec)
    throw InputError(checkpoint.path() + ": tensor \"" + name +
                     "\": expected " + describe(item.spec) + ", got " +
                     describe(saved));
  if (item.tensor.numel() == 0)
    return;
  bool isDirect = item.tensor.is_cpu() && item.tensor.is_contiguous();
  at::Tensor to =
      isDirect ? item.tensor
               : at::empty(item.tensor.sizes(), item.tensor.scalar_type());
  checkpoint.read(
      name, item.chunk,
      {static_cast<std::byte *>(to.mutable_data_ptr()), to.nbytes()});
  if (!isDirect)
    copyLaidOut(item.tensor, to, checkpoint.path() + ": \"" + name + "\"");
}

void SessionState::readModel(const NativeCheckpoint &checkpoint) {
  for (const Item &item : modelItems()) {
    read(checkpoint, item);
    session.progress().beat();
  }
}

void SessionState::readTraining(const NativeCheckpoint &checkpoint) {
  std::set<std::string> names;
  for (const Item &item : modelItems())
    names.insert(item.name);
  for (const Item &item : optimizerItems()) {
    read(checkpoint, item);
    session.progress().beat();
    names.insert(item.name);
  }
  for (const auto &[name, spec] : checkpoint.manifest().tensors)
    if (!isOwnName(name) && !names.contains(name))
      throw InputError(checkpoint.path() + ": tensor \"" + name +
                       "\" is not in the plan");
  const RunState &state = checkpoint.manifest().state;
  Executor &executor = session.executor();
  GradScaler *scaler = executor.gradScaler();
  if (bool(scaler) != state.scaler.has_value())
    throw InputError(checkpoint.path() + ": expected " + (scaler ? "a" : "no") +
                     " loss scaler, as the plan has it");
  session.setSteps(state.step);
  if (ShardedOptimizer *optimizer = executor.shardedOptimizer())
    optimizer->setSteps(state.updates);
  if (scaler)
    scaler->setState(
        {float(state.scaler->scale), int32_t(state.scaler->growthTracker)});
  if (state.worldSize != plan.worldSize) {
    device.seed(state.seed + uint64_t(state.step));
    return;
  }
  for (auto &[name, generator] : generators()) {
    at::Tensor bytes = generator.get_state();
    // Of another kind of device, or another PyTorch.
    if (!checkpoint.has(name) ||
        checkpoint.manifest().tensors.at(name).shape != bytes.sizes()) {
      generator.set_current_seed(state.seed + uint64_t(state.step));
      continue;
    }
    read(checkpoint, {name,
                      {bytes.sizes().vec(), plan::DType::UInt8},
                      wholeOf(bytes.sizes().vec()),
                      bytes});
    generator.set_state(bytes);
  }
}

} // namespace fsdp::runtime
