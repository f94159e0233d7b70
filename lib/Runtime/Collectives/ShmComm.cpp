//===- ShmComm.cpp - collectives over shared memory -----------------------===//
#include "fsdp/Runtime/Collectives/ShmComm.h"
#include "fsdp/Runtime/Collectives/Reduce.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Memory/Layout.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace fsdp::runtime {

namespace {

/// How long a wait spins before it sleeps: about what a wake-up costs.
constexpr auto kSpin = std::chrono::microseconds(50);

void pauseCpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

} // namespace

ShmComm::ShmComm(const plan::Plan &plan, ShmSegment &segment, int64_t rank,
                 bool concurrent, const ShmComm *other)
    : plan(plan), segment(segment), ownRank(rank), concurrent(concurrent),
      sights(segment, rank), shardGroup(plan.shardGroup(rank)),
      replicateGroup(plan.replicateGroup(rank)),
      everybody(size_t(plan.worldSize)), pidfds(size_t(plan.worldSize), -1),
      keptParts(plan.units.size()), messages(plan) {
  std::iota(everybody.begin(), everybody.end(), 0);
  for (size_t p = 0; p < plan.params.size(); ++p) {
    const plan::Param &param = plan.params[p];
    auto isReducible = [](plan::DType dtype) {
      return plan::isFloatingPoint(dtype) || plan::isComplex(dtype);
    };
    if (segment.layout().reductionOf[p] >= 0 &&
        !(isReducible(param.gradSpec().dtype) && isReducible(param.spec.dtype)))
      throw InputError("parameter \"" + param.name +
                       "\": expected a floating-point or complex gradient to "
                       "reduce, got " +
                       std::string(plan::dtypeName(param.gradSpec().dtype)));
    at::ScalarType dtype = scalarType(param.spec.dtype);
    ownShards.emplace_back();
    if (param.shardDim != 0 && plan.shards() > 1)
      ownShards.back() =
          other
              ? other->ownShards[p]
              : at::empty(plan::shardSpec(plan, int32_t(p), shardIndex()).shape,
                          dtype);
    if (param.unit == -1) {
      masters.push_back(other ? other->masters[p]
                              : at::empty(param.spec.shape, dtype));
      fullParams.push_back(masters.back());
      continue;
    }
    int64_t replica = plan.replicaIndex(ownRank);
    masters.push_back(at::from_blob(segment.master(replica, int32_t(p)),
                                    param.spec.shape, dtype));
    fullParams.push_back(at::from_blob(segment.param(replica, int32_t(p)),
                                       param.spec.shape,
                                       scalarType(param.computeSpec().dtype)));
  }
  own().pid.store(getpid());
}

ShmComm::~ShmComm() {
  for (int fd : pidfds)
    if (fd >= 0)
      close(fd);
}

int64_t ShmComm::ownBytes() const {
  return int64_t(segment.layout().totalBytes) / plan.worldSize;
}

at::Tensor ShmComm::shard(int32_t param) {
  if (plan.params[param].unit == -1)
    return masters[param];
  if (ownShards[param].defined())
    return ownShards[param];
  return shardOf(masters[param], param);
}

at::Tensor ShmComm::paddedShard(int32_t param) {
  at::Tensor own = shard(param);
  if (plan.params[param].unit == -1 || plan.params[param].shardDim != 0)
    return own;
  std::vector<int64_t> shape = plan::shardSpec(plan, param, 0).shape;
  std::byte *whole = segment.master(plan.replicaIndex(ownRank), param);
  int64_t rowBytes = plan.params[param].spec.numBytes() /
                     std::max<int64_t>(1, masters[param].size(0));
  return at::from_blob(whole + shardIndex() * shape[0] * rowBytes, shape,
                       own.options());
}

at::Tensor ShmComm::shardOf(const at::Tensor &whole, int32_t param) const {
  int64_t dim = plan.params[param].shardDim;
  plan::RowRange rows =
      plan::shardRows(whole.size(dim), plan.shards(), shardIndex());
  return whole.narrow(dim, rows.begin, rows.size());
}

void ShmComm::publish(bool frozen) {
  for (int32_t p = 0; p < int32_t(plan.params.size()); ++p) {
    const plan::Param &param = plan.params[p];
    bool changed = versions == 0 || frozen || param.requiresGrad;
    if (param.unit == -1 || !changed)
      continue;
    if (ownShards[p].defined())
      shardOf(masters[p], p).copy_(ownShards[p]);
    if (param.computeDtype && !plan.units[param.unit].cpuOffload)
      copyOwnRows(p);
  }
  own().published.publish(++versions);
}

void ShmComm::copyOwnRows(int32_t param) {
  shardOf(fullParams[param], param).copy_(shard(param));
}

// Peers may still read what the unit's last gather gave: within a step the same
// bytes are written again, and between steps comes beginUpdate.
void ShmComm::copyToDevice(int32_t unit, const at::Tensor &) {
  for (int32_t param : plan.units[unit].params)
    copyOwnRows(param);
  own().copied.publish(++copies);
}

void ShmComm::beginStep(int64_t newStep) {
  step = newStep;
  beginMicrobatch();
}

void ShmComm::beginMicrobatch() {
  stepBase += uint32_t(issued);
  issued = 0;
  acquired = 0;
}

Collective ShmComm::allGather(int32_t unit, int64_t group, const at::Tensor &) {
  if (group > 0)
    return gatherParts(unit, group);
  Collective gather;
  for (int32_t param : plan.units[unit].params)
    gather.results.push_back(fullParams[param]);
  bool offloaded = plan.units[unit].cpuOffload;
  gather.wait = [this, unit,
                 counter =
                     offloaded ? &RankState::copied : &RankState::published,
                 target = offloaded ? copies : versions] {
    waitAll(shardGroup, counter, target, {"all_gather", unit});
  };
  return gather;
}

std::vector<at::Tensor> ShmComm::gatherMasters(int32_t unit) {
  waitAll(shardGroup, &RankState::published, versions, {"all_gather", unit});
  std::vector<at::Tensor> result;
  for (int32_t param : plan.units[unit].params)
    result.push_back(masters[param]);
  return result;
}

// Peers write parameters only after this rank's beginUpdate, so the end of a
// unit's use before it needs no message.
void ShmComm::reshard(int32_t unit, int64_t keep, const at::Tensor &) {
  if (keep > 0)
    keepPart(unit, keep);
}

void ShmComm::acquire(int32_t ordinal) {
  if (ordinal < acquired)
    return;
  // Neighbours lie apart; everything before them must have been read.
  uint32_t below = stepBase + uint32_t(std::max(0, ordinal - 1));
  awaitInputsRead(below);
  if (!concurrent)
    acquired = ordinal + 1;
}

void ShmComm::awaitInputsRead(uint32_t below) {
  if (concurrent)
    wait(ownRank, &RankState::inputsRead, below, {"reduce_scatter"});
  else
    finish(below);
  waitAll(shardGroup, &RankState::inputsRead, below, {"reduce_scatter"});
}

void *ShmComm::reduceInput(int32_t param) {
  if (plan.shards() == 1)
    return nullptr;
  int32_t ordinal = segment.layout().reductionOf[param];
  if (segment.layout().dedicated[param]) {
    // Read by everybody before the last update, unless there was none.
    awaitInputsRead(stepBase);
  } else {
    acquire(ordinal);
  }
  return segment.grad(ownRank, param);
}

Collective ShmComm::reduceScatter(const plan::ReduceScatter &reduce,
                                  const std::vector<at::Tensor> &grads,
                                  const at::Tensor &) {
  int32_t ordinal = issued++;
  if (plan.shards() == 1) {
    std::vector<at::Tensor> outs;
    for (size_t i = 0; i < grads.size(); ++i) {
      GradReduction how = makeGradReduction(plan, reduce, i);
      // Where the plan says so; otherwise the gradient is a part of more.
      bool shares = plan.values[reduce.outs[i]].storage != -1;
      bool inPlace = segment.layout().reducedInPlace[reduce.params[i]];
      at::Tensor grad = shares || !how.isIdentity() || inPlace
                            ? grads[i].contiguous()
                            : grads[i].clone(at::MemoryFormat::Contiguous);
      if (inPlace)
        awaitShardsRead();
      if (!how.isIdentity() || inPlace) {
        at::Tensor out = shardGrad(reduce, i);
        reduceInOrder(how, out.mutable_data_ptr(),
                      {static_cast<const std::byte *>(grad.const_data_ptr())},
                      grad.numel());
        grad = out;
      }
      outs.push_back(grad);
    }
    return {std::move(outs), [] {}};
  }
  acquire(ordinal);
  uint32_t index = stepBase + uint32_t(ordinal);
  Pending entry{index, &reduce, {}};
  for (size_t i = 0; i < grads.size(); ++i) {
    int32_t param = reduce.params[i];
    const plan::TensorSpec &spec = plan.values[reduce.ins[i]];
    std::byte *place = segment.grad(ownRank, param);
    if (grads[i].const_data_ptr() != place || !grads[i].is_contiguous()) {
      // A transposed view of the place itself cannot be copied in place.
      auto *data = static_cast<const std::byte *>(grads[i].const_data_ptr());
      bool aliases = data >= place && data < place + spec.numBytes();
      at::from_blob(place, spec.shape, scalarType(spec.dtype))
          .copy_(aliases ? grads[i].clone() : grads[i]);
    }
    entry.outs.push_back(shardGrad(reduce, i));
  }
  std::vector<at::Tensor> outs = entry.outs;
  own().inputsReady.publish(index + 1);
  pending.push_back(std::move(entry));
  while (!pending.empty() &&
         allReached(&RankState::inputsReady, pending.front().index + 1))
    finishFirst();
  return {std::move(outs), [this, index] { finish(index + 1); }};
}

at::Tensor ShmComm::shardGrad(const plan::ReduceScatter &reduce,
                              size_t index) const {
  int32_t param = reduce.params[index];
  at::ScalarType dtype = scalarType(plan.values[reduce.outs[index]].dtype);
  if (segment.layout().reducedInPlace[param])
    return shardPlace(param, dtype);
  return at::empty(plan::shardSpec(plan, param, shardIndex()).shape, dtype);
}

at::Tensor ShmComm::shardPlace(int32_t param, at::ScalarType dtype) const {
  return at::from_blob(segment.shardGrad(ownRank, param),
                       plan::shardSpec(plan, param, shardIndex()).shape, dtype);
}

void ShmComm::awaitShardsRead() {
  waitAll(replicateGroup, &RankState::shardsRead, allReduceRounds,
          {"all_reduce"});
}

Collective ShmComm::allReduce(const plan::AllReduce &reduce,
                              const std::vector<at::Tensor> &shards,
                              const at::Tensor &) {
  PendingAllReduce entry{&reduce, {}};
  for (size_t i = 0; i < shards.size(); ++i) {
    int32_t param = reduce.params[i];
    if (!segment.layout().reducedInPlace[param]) {
      awaitShardsRead();
      shardPlace(param, shards[i].scalar_type()).copy_(shards[i]);
    }
    entry.outs.push_back(at::empty(shards[i].sizes(),
                                   scalarType(plan.params[param].spec.dtype)));
  }
  pendingAllReduces.push_back(entry);
  return {entry.outs, [this, round = allReduceRounds + 1] {
            if (int32_t(allReduceRounds - round) < 0)
              finishAllReduces();
          }};
}

void ShmComm::finishAllReduces() {
  uint32_t round = ++allReduceRounds;
  own().shardsReady.publish(round);
  for (PendingAllReduce &entry : pendingAllReduces) {
    waitAll(replicateGroup, &RankState::shardsReady, round,
            {"all_reduce", entry.reduce->unit});
    std::vector<plan::MessagePlace> places =
        messages.messagePlaces(entry.reduce->params);
    for (size_t i = 0; i < entry.outs.size(); ++i) {
      std::vector<const std::byte *> in;
      for (int64_t rank : replicateGroup)
        in.push_back(segment.shardGrad(rank, entry.reduce->params[i]));
      reduceAroundRing(makeGradReduction(plan, *entry.reduce, i),
                       entry.outs[i].mutable_data_ptr(), in,
                       entry.outs[i].numel(), places[i].begin, places[i].row);
    }
  }
  own().shardsRead.publish(round);
  pendingAllReduces.clear();
}

void ShmComm::finish(uint32_t index) {
  while (!pending.empty() && int32_t(pending.front().index - index) < 0)
    finishFirst();
}

void ShmComm::finishFirst() {
  Pending entry = std::move(pending.front());
  pending.pop_front();
  waitAll(shardGroup, &RankState::inputsReady, entry.index + 1,
          {"reduce_scatter", entry.reduce->unit});
  std::vector<plan::MessagePlace> places =
      messages.messagePlaces(entry.reduce->params);
  for (size_t i = 0; i < entry.outs.size(); ++i) {
    int32_t param = entry.reduce->params[i];
    if (segment.layout().reducedInPlace[param])
      awaitShardsRead();
    int64_t width = plan::byteWidth(plan.values[entry.reduce->ins[i]].dtype);
    plan::ShardRuns runs = plan::shardRuns(plan, param, shardIndex());
    GradReduction how = makeGradReduction(plan, *entry.reduce, i);
    auto *out = static_cast<std::byte *>(entry.outs[i].mutable_data_ptr());
    int64_t begin = shardIndex() * places[i].row + places[i].begin;
    std::vector<const std::byte *> in;
    for (int64_t run = 0; run < runs.count; ++run) {
      in.clear();
      for (int64_t rank : shardGroup)
        in.push_back(segment.grad(rank, param) +
                     (runs.begin + run * runs.stride) * width);
      reduceAroundRing(how, out, in, runs.size, begin,
                       plan.shards() * places[i].row);
      begin += runs.size;
      out += runs.size * int64_t(entry.outs[i].element_size());
    }
  }
  own().inputsRead.publish(entry.index + 1);
}

void ShmComm::beginUpdate() {
  own().released.publish(++releases);
  waitAll(everybody, &RankState::released, releases, {"optimizer_step"});
}

void ShmComm::barrier() {
  own().barriers.publish(++barriers);
  waitAll(everybody, &RankState::barriers, barriers, {"barrier"});
}

std::vector<RankStats> ShmComm::exchangeStats(const RankStats &stats) {
  uint32_t slot = exchanges++ % 2;
  own().stats[slot] = stats;
  own().statsWritten.publish(exchanges);
  waitAll(everybody, &RankState::statsWritten, exchanges, {"statistics"});
  std::vector<RankStats> all;
  for (int64_t r = 0; r < worldSize(); ++r)
    all.push_back(segment.state(r).stats[slot]);
  return all;
}

std::vector<std::vector<double>>
ShmComm::gather(const std::vector<double> &numbers) {
  std::vector<std::vector<double>> all;
  if (ownRank == 0)
    all.resize(size_t(worldSize()));
  constexpr size_t kPart = std::size(RankState().numbers);
  for (size_t begin = 0; begin < numbers.size(); begin += kPart) {
    size_t count = std::min(kPart, numbers.size() - begin);
    std::copy_n(numbers.begin() + ptrdiff_t(begin), count, own().numbers);
    barrier();
    for (size_t r = 0; r < all.size(); ++r) {
      const double *from = segment.state(int64_t(r)).numbers;
      all[r].insert(all[r].end(), from, from + count);
    }
    barrier();
  }
  return all;
}

bool ShmComm::allReached(Counter RankState::*counter, uint32_t target) const {
  for (int64_t r : shardGroup)
    if (!(segment.state(r).*counter).reached(target))
      return false;
  return true;
}

void ShmComm::waitAll(const std::vector<int64_t> &ranks,
                      Counter RankState::*counter, uint32_t target,
                      Waiting waiting) {
  for (int64_t r : ranks)
    if (r != ownRank)
      wait(r, counter, target, waiting);
}

bool ShmComm::peerDied(int64_t peer) {
  if (peer == ownRank)
    return false;
  std::lock_guard guard(pidfdLock);
  int &fd = pidfds[peer];
  if (fd < 0) {
    int32_t pid = segment.state(peer).pid.load();
    // Not started yet: its launcher reports a death before this point.
    if (pid == 0)
      return false;
    fd = int(syscall(SYS_pidfd_open, pid, 0));
    if (fd < 0)
      return errno == ESRCH;
  }
  pollfd query{fd, POLLIN, 0};
  return poll(&query, 1, 0) > 0;
}

void ShmComm::wait(int64_t peer, Counter RankState::*member, uint32_t target,
                   Waiting waiting) {
  Counter &counter = segment.state(peer).*member;
  if (counter.reached(target))
    return;
  auto begin = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - begin < kSpin) {
    for (int i = 0; i < 16; ++i)
      pauseCpu();
    if (counter.reached(target))
      return;
  }
  WaitCount counted(sights);
  Stall stall(sights, *patience);
  while (!counter.waitSlice(target)) {
    std::string where = std::string("in ") + waiting.collective;
    if (waiting.unit >= 0)
      where += " of unit \"" + plan.units[waiting.unit].name + "\"";
    where += " at step " + std::to_string(step + 1);
    checkWait(peer, counter, target, where);
    std::optional<Stall::Cause> cause = stall.overdue();
    if (cause && !counter.reached(target))
      throw PeerHungError(cause->text + "; this rank was waiting " + where,
                          cause->processes);
  }
}

void ShmComm::checkWait(int64_t peer, const Counter &counter, uint32_t target,
                        const std::string &where) {
  if (segment.header().aborted.load())
    throw AbortedError("stopped while waiting " + where);
  // What the peer did before it died still counts.
  if (peerDied(peer) && !counter.reached(target) &&
      !segment.header().aborted.load())
    throw PeerLostError("rank " + std::to_string(peer) + " (pid " +
                        std::to_string(segment.state(peer).pid.load()) +
                        ") died; this rank was waiting " + where);
}

} // namespace fsdp::runtime
