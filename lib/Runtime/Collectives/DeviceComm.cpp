//===- DeviceComm.cpp - collectives of ranks with memory of their own -----===//
#include "fsdp/Runtime/Collectives/DeviceComm.h"
#include "fsdp/Plan/DeviceBuffers.h"
#include "fsdp/Plan/Memory.h"
#include "fsdp/Runtime/Collectives/FlatCopy.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Memory/Layout.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

namespace fsdp::runtime {

namespace {

/// Those of RankStats.
constexpr int64_t kStatsFields = 8;

/// Rows of a parameter that come before each part.
std::vector<int64_t> rowBegins(int64_t rows, int64_t parts) {
  std::vector<int64_t> begins;
  for (int64_t i = 0; i < parts; ++i)
    begins.push_back(plan::shardRows(rows, parts, i).begin);
  begins.push_back(rows);
  return begins;
}

int64_t rowElements(const plan::Param &param) {
  int64_t rows = param.spec.shape.empty() ? 1 : param.spec.shape[0];
  return rows == 0 ? 0 : param.spec.numElements() / rows;
}

int64_t numRows(const plan::Param &param) {
  return param.spec.shape.empty() ? 1 : param.spec.shape[0];
}

/// As sums take them, and copies: a complex number as two real ones.
at::Tensor real(const at::Tensor &tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

std::vector<at::Tensor> real(const std::vector<at::Tensor> &tensors) {
  std::vector<at::Tensor> views;
  for (const at::Tensor &tensor : tensors)
    views.push_back(real(tensor));
  return views;
}

/// copyOut, with `strides` in elements of the flat tensor.
void copyFrom(const at::Tensor &flat, std::vector<int64_t> strides,
              const std::vector<at::Tensor> &outs) {
  if (flat.is_complex())
    for (int64_t &stride : strides)
      stride *= 2;
  copyOut(real(outs), real(flat).view({-1}), strides);
}

} // namespace

DeviceComm::DeviceComm(const plan::Plan &plan, Device &device,
                       std::shared_ptr<Transport> given,
                       const DeviceComm *other)
    : plan(plan), device(device), transport(std::move(given)),
      gathered(plan.units.size()) {
  if (other) {
    hostShards = other->hostShards;
    shards = other->shards;
    paddedShards = other->paddedShards;
    plansMade = other->plansMade;
  } else {
    placeShards();
    plansMade = std::make_shared<int64_t>(0);
  }
  ownStats = empty({kStatsFields}, plan::DType::Float64);
  allStats = empty({worldSize(), kStatsFields}, plan::DType::Float64);
  connectGroups();
}

void DeviceComm::placeShards() {
  std::vector<int64_t> offsets(plan.params.size(), -1);
  int64_t bytes = 0;
  for (size_t p = 0; p < plan.params.size(); ++p) {
    int32_t unit = plan.params[p].unit;
    if (unit == -1 || !plan.units[unit].cpuOffload)
      continue;
    offsets[p] = bytes;
    int64_t own = plan::shardSpec(plan, int32_t(p), 0).numBytes();
    bytes += plan::alignTo(own);
  }
  if (bytes > 0) {
    hostShards = device.reserveHost(size_t(bytes));
    std::memset(hostShards->base(), 0, size_t(bytes));
  }
  for (size_t p = 0; p < plan.params.size(); ++p) {
    plan::TensorSpec spec = plan::shardSpec(plan, int32_t(p), 0);
    at::TensorOptions options = at::dtype(scalarType(spec.dtype));
    at::Tensor padded =
        offsets[p] == -1 ? at::zeros(spec.shape, options.device(device.where()))
                         : at::from_blob(
                               hostShards->base() + offsets[p], spec.shape,
                               [keep = hostShards](void *) {}, options);
    plan::TensorSpec own = plan::shardSpec(plan, int32_t(p), shardIndex());
    shards.push_back(
        own.shape == spec.shape ? padded : padded.narrow(0, 0, own.shape[0]));
    paddedShards.push_back(std::move(padded));
  }
}

void DeviceComm::connectGroups() {
  std::string prefix;
  if (int64_t before = (*plansMade)++)
    prefix = "plan " + std::to_string(before + 1) + " ";
  std::vector<int64_t> everybody(static_cast<size_t>(worldSize()));
  std::iota(everybody.begin(), everybody.end(), 0);
  std::vector<int64_t> shardGroup = plan.shardGroup(rank());
  world = transport->connect(prefix + "world", everybody);
  gathers = transport->connect(prefix + "gather", shardGroup);
  reduces = transport->connect(prefix + "reduce", shardGroup);
  replicates =
      transport->connect(prefix + "replicate", plan.replicateGroup(rank()));
  for (const plan::Instruction &instruction : plan.instructions) {
    const auto *reshard = std::get_if<plan::Reshard>(&instruction.kind);
    if (!reshard || reshard->keep == 0 || groups.contains(reshard->keep))
      continue;
    std::vector<int64_t> neighbours;
    for (int64_t r : shardGroup)
      if (r / reshard->keep == rank() / reshard->keep)
        neighbours.push_back(r);
    groups[reshard->keep] = transport->connect(
        prefix + "group." + std::to_string(reshard->keep), neighbours);
  }
}

at::Tensor DeviceComm::empty(const std::vector<int64_t> &shape,
                             plan::DType dtype) const {
  return at::empty(shape, at::dtype(scalarType(dtype)).device(device.where()));
}

std::string DeviceComm::nameOf(const char *kind, int32_t unit) const {
  return std::string(kind) + " of unit \"" + plan.units[unit].name + "\"";
}

void DeviceComm::copyToDevice(int32_t unit, const at::Tensor &buffer) {
  std::vector<at::Tensor> copies = copiedShards(unit, buffer);
  for (size_t i = 0; i < copies.size(); ++i)
    copyFromHost(copies[i], shards[plan.units[unit].params[i]]);
}

std::vector<at::Tensor>
DeviceComm::copiedShards(int32_t unit, const at::Tensor &buffer) const {
  std::vector<int64_t> parts = plan::copiedParts(plan, unit);
  std::vector<at::Tensor> copies;
  for (size_t i = 0; i + 1 < parts.size(); ++i) {
    int32_t param = plan.units[unit].params[i];
    copies.push_back(partOf(buffer, parts[i], shards[param].numel(),
                            plan.params[param].computeSpec().dtype)
                         .view(shards[param].sizes()));
  }
  return copies;
}

at::Tensor DeviceComm::partOf(const at::Tensor &buffer, int64_t begin,
                              int64_t elements, plan::DType dtype) {
  return buffer.narrow(0, begin, elements * plan::byteWidth(dtype))
      .view(scalarType(dtype));
}

void DeviceComm::copyFromHost(const at::Tensor &to,
                              const at::Tensor &from) const {
  if (from.numel() == 0)
    return;
  // The host would cast it in other memory, and wait.
  at::Tensor same = to;
  if (to.scalar_type() != from.scalar_type())
    same = at::empty(from.sizes(), from.options().device(device.where()));
  device.copy(same.mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
  if (!same.is_same(to))
    to.copy_(same);
}

at::Tensor DeviceComm::gather(int32_t index, const at::Tensor &own,
                              plan::DType dtype,
                              std::vector<Communicator::Part> &parts,
                              std::vector<std::function<void()>> &after) const {
  const plan::Param &param = plan.params[index];
  bool casts = own.scalar_type() != scalarType(dtype);
  if (plan.shards() == 1 && !casts && own.device() == device.where())
    return own;
  at::Tensor whole = empty(param.spec.shape, dtype);
  if (whole.numel() == 0)
    return whole;
  int64_t ranks = plan.shards();
  if (param.shardDim != 0 && ranks > 1) {
    // Each rank's part apart, then beside each other.
    at::Tensor stacked = empty({ranks, own.numel()}, dtype);
    at::Tensor place = stacked[shardIndex()];
    place.copy_(own.reshape({-1}));
    std::vector<int64_t> begins;
    for (int64_t r = 0; r <= ranks; ++r)
      begins.push_back(r * own.numel());
    parts.push_back({stacked, place, begins});
    after.push_back(
        [stacked, whole, shape = own.sizes().vec(), dim = param.shardDim] {
          for (int64_t r = 0; r < stacked.size(0); ++r)
            whole.narrow(dim, r * shape[size_t(dim)], shape[size_t(dim)])
                .copy_(stacked[r].view(shape));
        });
    return whole;
  }
  std::vector<int64_t> begins = rowBegins(numRows(param), ranks);
  for (int64_t &begin : begins)
    begin *= rowElements(param);
  at::Tensor place =
      whole.view({-1}).narrow(0, begins[size_t(shardIndex())], own.numel());
  at::Tensor source = own.reshape({-1});
  if (casts || ranks == 1)
    source = place.copy_(source);
  if (ranks > 1)
    parts.push_back({whole, source, begins});
  return whole;
}

Collective
DeviceComm::finishGather(Communicator &communicator, const std::string &what,
                         std::vector<at::Tensor> results,
                         const std::vector<Communicator::Part> &parts,
                         std::vector<std::function<void()>> after) {
  Collective begun{std::move(results), [] {}};
  if (parts.empty())
    return begun;
  Wait wait = communicator.allGather(what, parts);
  auto finish = [wait, after = std::move(after), done = false]() mutable {
    if (std::exchange(done, true))
      return;
    c10::InferenceMode guard;
    if (wait)
      wait();
    for (const std::function<void()> &step : after)
      step();
  };
  if (wait)
    begun.wait = std::move(finish);
  else
    finish();
  return begun;
}

Collective DeviceComm::allGather(int32_t unit, int64_t group,
                                 const at::Tensor &source) {
  if (group > 0)
    return gatherKept(unit, group, source);
  std::vector<at::Tensor> own;
  if (source.defined())
    own = copiedShards(unit, source);
  else
    for (int32_t param : plan.units[unit].params)
      own.push_back(shards[param]);
  std::vector<at::Tensor> results;
  std::vector<Communicator::Part> parts;
  std::vector<std::function<void()>> after;
  for (size_t i = 0; i < own.size(); ++i) {
    int32_t param = plan.units[unit].params[i];
    results.push_back(gather(
        param, own[i], plan.params[param].computeSpec().dtype, parts, after));
  }
  gathered[unit] = results;
  return finishGather(*gathers, nameOf("all_gather", unit), std::move(results),
                      parts, std::move(after));
}

std::vector<at::Tensor> DeviceComm::gatherMasters(int32_t unit) {
  std::vector<at::Tensor> results;
  std::vector<Communicator::Part> parts;
  std::vector<std::function<void()>> after;
  for (int32_t param : plan.units[unit].params)
    results.push_back(gather(param, shards[param].to(device.where()),
                             plan.params[param].spec.dtype, parts, after));
  Collective begun = finishGather(*gathers, nameOf("all_gather", unit),
                                  std::move(results), parts, std::move(after));
  begun.wait();
  return begun.results;
}

void DeviceComm::reshard(int32_t unit, int64_t keep, const at::Tensor &buffer) {
  if (keep > 0) {
    std::vector<at::Tensor> kept = keptShares(unit, keep, buffer);
    for (size_t i = 0; i < kept.size(); ++i) {
      std::vector<int64_t> begins =
          plan::keptBegins(plan, plan.units[unit].params[i], keep);
      auto own = size_t(shardIndex() % keep);
      kept[i].copy_(gathered[unit][i].reshape({-1}).slice(0, begins[own],
                                                          begins[own + 1]));
    }
  }
  gathered[unit].clear();
}

std::vector<at::Tensor> DeviceComm::keptShares(int32_t unit, int64_t keep,
                                               const at::Tensor &buffer) const {
  std::vector<int64_t> parts = plan::keptParts(plan, unit, keep);
  std::vector<at::Tensor> kept;
  for (size_t i = 0; i + 1 < parts.size(); ++i) {
    int32_t param = plan.units[unit].params[i];
    std::vector<int64_t> begins = plan::keptBegins(plan, param, keep);
    auto own = size_t(shardIndex() % keep);
    kept.push_back(partOf(buffer, parts[i], begins[own + 1] - begins[own],
                          plan.params[param].computeSpec().dtype));
  }
  return kept;
}

Collective DeviceComm::gatherKept(int32_t unit, int64_t group,
                                  const at::Tensor &source) {
  std::vector<at::Tensor> kept = keptShares(unit, group, source);
  std::vector<at::Tensor> results;
  std::vector<Communicator::Part> parts;
  for (size_t i = 0; i < kept.size(); ++i) {
    int32_t param = plan.units[unit].params[i];
    plan::TensorSpec spec = plan.params[param].computeSpec();
    results.push_back(empty(spec.shape, spec.dtype));
    if (results.back().numel() > 0)
      parts.push_back(
          {results.back(), kept[i], plan::keptBegins(plan, param, group)});
  }
  gathered[unit] = results;
  return finishGather(*groups.at(group), nameOf("all_gather", unit),
                      std::move(results), parts, {});
}

Collective DeviceComm::reduceScatter(const plan::ReduceScatter &reduce,
                                     const std::vector<at::Tensor> &grads,
                                     const at::Tensor &flat) {
  if (plan.shards() == 1)
    return reduceAlone(reduce, grads);
  int64_t ranks = plan.shards();
  std::vector<at::Tensor> whole;
  std::vector<int64_t> strides;
  int64_t chunk = 0;
  for (size_t i = 0; i < grads.size(); ++i) {
    int64_t dim = plan.params[reduce.params[i]].shardDim;
    // As FSDP2: the parts one below the other.
    whole.push_back(dim == 0 ? grads[i].contiguous()
                             : at::cat(grads[i].chunk(ranks, dim), 0));
    strides.push_back(plan::chunkElements(plan, reduce.params[i]));
    chunk += strides.back();
  }
  Collective begun{{}, [] {}};
  for (size_t i = 0; i < grads.size(); ++i)
    begun.results.push_back(
        empty(plan::shardSpec(plan, reduce.params[i], shardIndex()).shape,
              plan.values[reduce.outs[i]].dtype));
  if (chunk == 0)
    return begun;
  copyIn(real(flat).view({-1}), real(whole), ranks);
  auto divisors = reduce.divisors.value_or(plan::ReduceScatter::Divisors{});
  if (divisors.predivide != 1)
    flat.div_(divisors.predivide);
  // In place where the backend can; Gloo's ranks read what others send.
  at::Tensor own = flat.narrow(0, shardIndex() * chunk, chunk);
  if (device.where().is_cpu())
    own = at::empty_like(own);
  Wait wait = reduces->reduceScatter(
      nameOf("reduce_scatter", reduce.unit), real(own), real(flat),
      reduce.divisors ? ReduceOp::Sum : ReduceOp::Average,
      divisors.premultiply);
  auto finish = [wait, own, flat = flat, strides, outs = begun.results,
                 postdivide = divisors.postdivide, done = false]() mutable {
    if (std::exchange(done, true))
      return;
    c10::InferenceMode guard;
    if (wait)
      wait();
    if (postdivide != 1)
      own.div_(postdivide);
    copyFrom(own, strides, outs);
    own.reset();
    flat.reset();
  };
  if (wait)
    begun.wait = std::move(finish);
  else
    finish();
  return begun;
}

Collective DeviceComm::reduceAlone(const plan::ReduceScatter &reduce,
                                   const std::vector<at::Tensor> &grads) {
  Collective begun{{}, [] {}};
  auto divisors = reduce.divisors.value_or(plan::ReduceScatter::Divisors{});
  for (size_t i = 0; i < grads.size(); ++i) {
    at::ScalarType dtype = reduce.reduceDtype ? scalarType(*reduce.reduceDtype)
                                              : grads[i].scalar_type();
    plan::DType out = plan.values[reduce.outs[i]].dtype;
    at::Tensor sum = grads[i].contiguous();
    if (divisors.predivide != 1 || divisors.postdivide != 1)
      sum = sum.to(dtype).div(divisors.predivide).div_(divisors.postdivide);
    if (sum.scalar_type() != scalarType(out) || grads[i].scalar_type() != dtype)
      sum = empty(grads[i].sizes().vec(), out)
                .copy_(scalarType(out) == dtype ? sum : sum.to(dtype));
    else if (plan.values[reduce.outs[i]].storage == -1 &&
             sum.is_alias_of(grads[i]))
      sum = sum.clone(); // the gradient is a part of more
    begun.results.push_back(sum);
  }
  return begun;
}

Collective DeviceComm::allReduce(const plan::AllReduce &reduce,
                                 const std::vector<at::Tensor> &ins,
                                 const at::Tensor &flat) {
  std::vector<int64_t> strides;
  int64_t chunk = 0;
  Collective begun{{}, [] {}};
  for (size_t i = 0; i < ins.size(); ++i) {
    strides.push_back(plan::chunkElements(plan, reduce.params[i]));
    chunk += strides.back();
    begun.results.push_back(
        empty(ins[i].sizes().vec(), plan.values[reduce.outs[i]].dtype));
  }
  if (chunk == 0)
    return begun;
  if (plan.replicas == 1) {
    double divisor = reduce.postdivide.value_or(1);
    for (size_t i = 0; i < ins.size(); ++i)
      begun.results[i].copy_(divisor == 1 ? ins[i] : ins[i].div(divisor));
    return begun;
  }
  flat.zero_(); // FSDP2's padding takes part in the sum
  int64_t begin = 0;
  for (size_t i = 0; i < ins.size(); ++i) {
    flat.narrow(0, begin, ins[i].numel()).copy_(ins[i].reshape({-1}));
    begin += strides[i];
  }
  Wait wait = replicates->allReduce(
      nameOf("all_reduce", reduce.unit), real(flat),
      reduce.postdivide ? ReduceOp::Sum : ReduceOp::Average);
  auto finish = [wait, flat = flat, strides, outs = begun.results,
                 postdivide = reduce.postdivide, done = false]() mutable {
    if (std::exchange(done, true))
      return;
    c10::InferenceMode guard;
    if (wait)
      wait();
    if (postdivide && *postdivide != 1)
      flat.div_(*postdivide);
    copyFrom(flat, strides, outs);
    flat.reset();
  };
  if (wait)
    begun.wait = std::move(finish);
  else
    finish();
  return begun;
}

void DeviceComm::allReduce(const at::Tensor &given, Reduction reduction) {
  if (plan.shards() == 1)
    return;
  at::Tensor vector = given.to(device.where());
  allReduceHere(vector, reduction);
  if (!vector.is_same(given))
    given.copy_(vector);
}

void DeviceComm::allReduceHere(const at::Tensor &vector, Reduction reduction) {
  auto combine = [&](const at::Tensor &tensor, ReduceOp op) {
    if (Wait wait = reduces->allReduce("all_reduce", tensor, op))
      wait();
  };
  if (reduction == Reduction::Sum)
    return combine(vector, ReduceOp::Sum);
  // Whether NaN is the largest depends on the backend.
  at::Tensor isNan = at::isnan(vector);
  at::Tensor both = at::cat(
      {vector.masked_fill(isNan, -std::numeric_limits<double>::infinity()),
       isNan.to(vector.scalar_type())});
  combine(both, ReduceOp::Max);
  int64_t count = vector.numel();
  vector.copy_(both.narrow(0, 0, count)
                   .masked_fill(both.narrow(0, count, count).gt(0), NAN));
}

void DeviceComm::barrier() {
  at::Tensor nothing = empty({1}, plan::DType::Int32).zero_();
  if (Wait wait = world->allReduce("barrier", nothing, ReduceOp::Sum))
    wait();
  device.synchronize();
  checkFailure();
}

void DeviceComm::checkFailure() {
  if (device.where().is_cpu())
    return; // its waits throw
  std::string failure = transport->failure();
  if (failure.empty())
    return;
  std::string own = "rank " + std::to_string(rank()) + ": ";
  if (failure.starts_with(own))
    throw RunError(failure.substr(own.size()));
  throw AbortedError(failure);
}

void DeviceComm::abort() {
  for (auto *communicator : {&world, &gathers, &reduces, &replicates})
    (*communicator)->abort();
  for (auto &[size, communicator] : groups)
    communicator->abort();
}

std::vector<RankStats> DeviceComm::exchangeStats(const RankStats &own) {
  double fields[kStatsFields] = {own.loss,
                                 double(own.peakBytes),
                                 double(own.peakRssBytes),
                                 own.evaluationLoss,
                                 double(own.scratchBytes),
                                 double(own.heapAllocations),
                                 double(own.badGradient),
                                 double(own.requests)};
  ownStats.copy_(at::from_blob(fields, {kStatsFields}, at::kDouble));
  std::vector<int64_t> begins;
  for (int64_t r = 0; r <= worldSize(); ++r)
    begins.push_back(r * kStatsFields);
  if (Wait wait =
          world->allGather("statistics", {{allStats, ownStats, begins}}))
    wait();
  at::Tensor all = allStats.cpu();
  checkFailure();
  std::vector<RankStats> stats;
  for (int64_t r = 0; r < worldSize(); ++r) {
    const double *from = all.const_data_ptr<double>() + r * kStatsFields;
    stats.push_back({from[0], int64_t(from[1]), int64_t(from[2]), from[3],
                     int64_t(from[4]), int64_t(from[5]), int64_t(from[6]),
                     uint32_t(from[7])});
  }
  return stats;
}

std::vector<std::vector<double>>
DeviceComm::gather(const std::vector<double> &own) {
  auto count = int64_t(own.size());
  auto options = at::dtype(at::kDouble).device(device.where());
  at::Tensor mine = at::empty({count}, options);
  at::Tensor whole = at::empty({worldSize(), count}, options);
  mine.copy_(
      at::from_blob(const_cast<double *>(own.data()), {count}, at::kDouble));
  std::vector<int64_t> begins;
  for (int64_t r = 0; r <= worldSize(); ++r)
    begins.push_back(r * count);
  if (Wait wait = world->allGather("numbers", {{whole, mine, begins}}))
    wait();
  at::Tensor read = whole.cpu();
  checkFailure();
  std::vector<std::vector<double>> all;
  for (int64_t r = 0; rank() == 0 && r < worldSize(); ++r) {
    const double *from = read.const_data_ptr<double>() + r * count;
    all.emplace_back(from, from + count);
  }
  return all;
}

} // namespace fsdp::runtime
