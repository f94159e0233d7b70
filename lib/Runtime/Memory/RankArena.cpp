//===- RankArena.cpp - the memory in which a rank executes ----------------===//
#include "fsdp/Runtime/Memory/RankArena.h"

#include "fsdp/Plan/Operands.h"

#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace fsdp::runtime {

namespace {

/// Room for allocations that the plan does not know; virtual memory only.
constexpr size_t kMinSlack = size_t(1) << 30;

/// Memory that arenas gave out and that is not freed yet; also heap memory,
/// while a slot learns when it is freed.
struct Live {
  std::byte *end;
  RankArena *arena; ///< null if it is gone
  RankArena::Slot *slot;
  /// Frees a block of the heap; null for memory of the arena.
  c10::DeleterFnPtr inHeap;
};
struct Registry {
  std::mutex lock;
  std::map<std::byte *, Live> live;
};
/// Never destroyed: tensors may outlive static objects.
Registry &registry() {
  static auto *instance = new Registry();
  return *instance;
}

/// Frees what an arena gave out, false if it did not.
bool releaseLive(void *block) {
  Registry &all = registry();
  c10::DeleterFnPtr inHeap;
  {
    std::lock_guard guard(all.lock);
    auto found = all.live.find(static_cast<std::byte *>(block));
    if (found == all.live.end())
      return false;
    const Live &live = found->second;
    if (live.arena)
      live.arena->released(*live.slot);
    inHeap = live.inHeap;
    all.live.erase(found);
  }
  if (inHeap)
    inHeap(block);
  return true;
}

void deleteLive(void *block) { releaseLive(block); }

/// The results of an instruction on the device: value and parameter, -1 where
/// it is no parameter's.
std::vector<std::pair<plan::ValueId, int32_t>>
deviceResults(const plan::Instruction &instruction) {
  std::vector<std::pair<plan::ValueId, int32_t>> list;
  if (std::holds_alternative<plan::OffloadActivation>(instruction.kind))
    return list;
  std::visit(
      [&](const auto &kind) {
        if constexpr (requires { kind.outs[0] == kind.params[0]; })
          for (size_t i = 0; i < kind.outs.size(); ++i)
            list.emplace_back(kind.outs[i], kind.params[i]);
      },
      instruction.kind);
  bool areGradients = !list.empty();
  for (plan::ValueId value : plan::getResults(instruction))
    if (!areGradients || value == instruction.buffer)
      list.emplace_back(value, -1);
  return list;
}

} // namespace

thread_local RankArena::Site RankArena::current = 0;

RankArena::RankArena(const plan::Plan &plan, int64_t shardIndex, Device &device)
    : plan(plan), sites(plan.instructions.size() + plan.evaluation.size() + 2),
      stepPositions(int64_t(plan.instructions.size())),
      arenaBytes(plan.arena ? plan.arena->bytes : 0), device(device),
      isAsynchronous(!device.where().is_cpu()),
      alignment(int64_t(device.alignment())),
      memory(device.reserve(2 * size_t(arenaBytes) + kMinSlack)),
      base(memory->base()), mappedBytes(memory->bytes()) {
  expectValues(plan, shardIndex);
  findTops(plan);
  memory->back(size_t(arenaBytes));
  countAllocatedBytes(arenaBytes);
  setRawFree(&releaseLive);
}

RankArena::~RankArena() {
  Registry &all = registry();
  std::lock_guard guard(all.lock);
  bool alive = false;
  for (auto &[block, live] : all.live)
    if (live.arena == this) {
      live.arena = nullptr;
      alive |= !live.inHeap;
    }
  countAllocatedBytes(-arenaBytes - extraBytes());
  if (alive)
    new std::shared_ptr(memory);
}

void RankArena::expectValues(const plan::Plan &plan, int64_t shardIndex) {
  auto expect = [&](Site site, plan::ValueId value, int32_t param) {
    const plan::Value &spec = plan.values[value];
    if (spec.offset == -1)
      return;
    plan::TensorSpec own = spec;
    // A shard's value is that of rank 0; not so a whole gradient.
    if (param != -1 && own.shape == plan::shardSpec(plan, param, 0).shape)
      own.shape = plan::shardSpec(plan, param, shardIndex).shape;
    if (own.numBytes() > 0)
      sites[site].values.push_back({value, size_t(own.numBytes())});
  };
  for (Site site = 0; site + 2 < sites.size(); ++site) {
    for (auto [value, param] :
         deviceResults(plan::instructionAt(plan, int64_t(site))))
      expect(site, value, param);
  }
  for (Site site : {stepInputs(), evaluationInputs()})
    for (const plan::Input &input : plan.inputs)
      expect(site, input.value, -1);
}

void RankArena::findTops(const plan::Plan &plan) {
  plan::Memory memory = plan::replayMemory(plan, plan::arenaModel(plan));
  std::vector<std::vector<int64_t>> begins(size_t(memory.positions) + 1),
      ends(begins.size());
  for (const plan::Storage &storage : memory.storages) {
    int64_t offset =
        storage.value == -1 ? -1 : plan.values[storage.value].offset;
    // A gathered parameter that nothing uses has no value.
    int64_t end = offset == -1 ? 0 : offset + storage.bytes;
    for (const plan::Life &life : storage.lives) {
      begins[size_t(life.first)].push_back(end);
      ends[size_t(life.last)].push_back(end);
    }
  }
  std::multiset<int64_t> alive;
  tops.resize(size_t(memory.positions));
  for (size_t i = 0; i < tops.size(); ++i) {
    alive.insert(begins[i].begin(), begins[i].end());
    tops[i] = alive.empty() ? 0 : *alive.rbegin();
    for (int64_t end : ends[i])
      alive.erase(alive.find(end));
  }
}

int64_t RankArena::aligned(size_t bytes) const {
  return plan::alignTo(int64_t(bytes), alignment);
}

int64_t RankArena::reservedEnd() const {
  return aligned(size_t(arenaBytes + reservedBytes));
}

int64_t RankArena::positionOf(Site site) const {
  if (site == stepInputs())
    return 0;
  return site == evaluationInputs() ? stepPositions : int64_t(site);
}

void RankArena::begin(Site site) {
  // Other threads free too.
  std::lock_guard guard(registry().lock);
  current = site;
  SiteState &state = sites[site];
  state.next = 0;
  state.ticks = 0;
  auto position = size_t(positionOf(site));
  state.unmeasured = position < tops.size() ? tops[position] : arenaBytes;
  ++state.run;
}

RankArena::Slot &RankArena::match(size_t bytes) {
  SiteState &site = sites[current];
  auto fits = [&](const std::unique_ptr<Slot> &slot) {
    return slot->bytes == bytes && slot->run != site.run && !slot->alive;
  };
  auto begin = site.slots.begin(), end = site.slots.end();
  auto found = std::find_if(begin + long(site.next), end, fits);
  if (found == end)
    found = std::find_if(begin, begin + long(site.next), fits);
  if (found != end && fits(*found)) {
    site.next = size_t(found - begin) + 1;
    return **found;
  }
  measured = true;
  Slot &slot = *site.slots.emplace_back(std::make_unique<Slot>());
  slot.bytes = bytes;
  slot.site = current;
  site.next = site.slots.size();
  // A guess, which settle() corrects.
  auto isAlive = [&](plan::ValueId value) {
    return std::any_of(
        site.slots.begin(), site.slots.end(),
        [&](const auto &s) { return s->value == value && s->alive; });
  };
  for (const Expected &expected : site.values)
    if (expected.bytes == bytes && expected.run != site.run &&
        !isAlive(expected.value)) {
      slot.value = expected.value;
      break;
    }
  return slot;
}

std::byte *RankArena::placeOf(const Slot &slot) {
  int64_t offset =
      slot.value != -1 ? plan.values[slot.value].offset : slot.offset;
  if (offset == -1 && !slot.stays && !slot.outlives && !isAsynchronous) {
    // Before it is measured: above what is alive, if there is room.
    SiteState &site = sites[current];
    int64_t end = site.unmeasured + aligned(slot.bytes);
    if (end <= arenaBytes)
      offset = std::exchange(site.unmeasured, end);
  }
  return offset == -1 ? nullptr : base + offset;
}

c10::DataPtr RankArena::allocate(size_t bytes) {
  Registry &all = registry();
  std::unique_lock guard(all.lock);
  SiteState &site = sites[current];
  Slot &slot = match(bytes);
  slot.run = site.run;
  slot.born = site.ticks++;
  slot.alive = true;
  for (Expected &expected : site.values)
    if (expected.value == slot.value)
      expected.run = site.run;
  std::byte *place = placeOf(slot);
  if (place && isTaken(place, bytes))
    place = nullptr;
  if (!place && !slot.stays)
    place = findRoom(bytes);
  if (place) {
    all.live[place] = {place + bytes, this, &slot, nullptr};
    return {place, place, &deleteLive, device.where()};
  }
  auto *block = static_cast<std::byte *>(device.allocate(bytes));
  if (slot.stays || !block) {
    slot.alive = false;
    return {block, block, device.deleter(), device.where()};
  }
  all.live[block] = {block + bytes, this, &slot, device.deleter()};
  return {block, block, &deleteLive, device.where()};
}

bool RankArena::isTaken(const std::byte *place, size_t bytes) {
  const std::map<std::byte *, Live> &live = registry().live;
  auto next = live.lower_bound(const_cast<std::byte *>(place));
  if (next != live.end() && next->first < place + bytes)
    return true;
  return next != live.begin() && std::prev(next)->second.end > place;
}

std::byte *RankArena::findRoom(size_t bytes) {
  // What a capture allocates and no step before did comes from the graph's
  // own pool.
  if (device.isCapturing())
    return nullptr;
  if (isAsynchronous)
    device.synchronize();
  auto after = [&](std::byte *end) {
    return base + aligned(size_t(end - base));
  };
  const std::map<std::byte *, Live> &live = registry().live;
  // Scratch of another stream may be in use, though nothing in it is alive.
  std::byte *begin =
      base + std::max(reservedEnd(), isAsynchronous ? scratchEnd : 0);
  auto next = live.lower_bound(begin);
  if (next != live.begin() && std::prev(next)->second.end > begin)
    begin = after(std::prev(next)->second.end);
  for (; next != live.end() && next->first < begin + bytes; ++next)
    begin = after(next->second.end);
  int64_t end = begin - base + aligned(bytes);
  if (end > int64_t(mappedBytes))
    return nullptr;
  keep(end - arenaBytes);
  return begin;
}

void RankArena::keep(int64_t bytes) {
  if (bytes <= keptBytes)
    return;
  memory->back(size_t(arenaBytes + bytes));
  countAllocatedBytes(bytes - keptBytes);
  keptBytes = bytes;
}

void RankArena::released(Slot &slot) {
  SiteState &site = sites[slot.site];
  slot.alive = false;
  if (slot.site == current && slot.run == site.run) {
    slot.died = site.ticks++;
    return;
  }
  slot.freedAt = positionOf(current);
  if (slot.outlives)
    return;
  slot.outlives = true;
  if (slot.value == -1) {
    slot.offset = -1;
    measured = true;
  }
}

void RankArena::settle(std::vector<at::Tensor> &values) {
  SiteState &site = sites[current];
  for (const Expected &expected : site.values) {
    at::Tensor &tensor = values[expected.value];
    if (!tensor.defined() || !tensor.has_storage())
      continue;
    auto *data = static_cast<const std::byte *>(tensor.storage().data());
    const std::byte *place = base + plan.values[expected.value].offset;
    bool aliases = false;
    {
      Registry &all = registry();
      std::lock_guard guard(all.lock);
      auto found = all.live.find(const_cast<std::byte *>(data));
      Slot *slot = found != all.live.end() && found->second.arena == this
                       ? found->second.slot
                       : nullptr;
      if (slot && slot->site == current && slot->run == site.run) {
        if (slot->value != expected.value) {
          for (auto &other : site.slots)
            if (other->value == expected.value)
              other->value = -1;
          slot->value = expected.value;
          measured = true;
        }
        if (data != place && isCall(current))
          move(tensor, found->first);
        continue;
      }
      aliases = data != place && data >= base && data < base + arenaBytes;
    }
    // The storage that it shares may end before it. The strides stay the same,
    // since operators may round differently if elements are laid out
    // differently.
    if (aliases) {
      auto strides = tensor.strides();
      bool repeats =
          std::find(strides.begin(), strides.end(), 0) != strides.end();
      tensor =
          repeats ? tensor.clone()
                  : at::empty_strided(tensor.sizes(), strides, tensor.options())
                        .copy_(tensor);
    }
  }
}

bool RankArena::isCall(Site site) const {
  if (site >= stepInputs())
    return false;
  const plan::Kind &kind = plan::instructionAt(plan, positionOf(site)).kind;
  return std::holds_alternative<plan::Call>(kind) ||
         std::holds_alternative<plan::Fused>(kind);
}

void RankArena::move(const at::Tensor &tensor, std::byte *from) {
  std::map<std::byte *, Live> &live = registry().live;
  Live block = live.at(from);
  std::byte *place = base + plan.values[block.slot->value].offset;
  size_t bytes = tensor.storage().nbytes();
  if (isTaken(place, bytes) || bytes > block.slot->bytes)
    return;
  device.copy(place, from, bytes);
  // Views follow: they share what holds the address.
  tensor.storage()
      .set_data_ptr({place, place, &deleteLive, device.where()})
      .release_context();
  live.erase(from);
  if (block.inHeap)
    block.inHeap(from);
  live[place] = {place + bytes, this, block.slot, nullptr};
}

void RankArena::endProgram() {
  if (!measured)
    return;
  measured = false;
  std::lock_guard guard(registry().lock);
  keepStaying();
  placeSurvivors();
  placeScratch();
}

void RankArena::keepStaying() {
  for (auto &[block, live] : registry().live) {
    if (live.arena != this || (!live.inHeap && block < base + arenaBytes))
      continue;
    live.slot->stays = true;
    if (!live.inHeap)
      reservedBytes = std::max(reservedBytes,
                               aligned(size_t(live.end - base)) - arenaBytes);
  }
}

void RankArena::placeSurvivors() {
  plan::Memory memory;
  memory.positions = int64_t(tops.size());
  std::vector<Slot *> slots;
  for (SiteState &site : sites)
    for (auto &slot : site.slots) {
      if (slot->value != -1 || slot->stays || !slot->outlives ||
          slot->offset != -1)
        continue;
      plan::Storage storage;
      storage.bytes = aligned(slot->bytes);
      plan::Life life{positionOf(slot->site), slot->freedAt};
      // Freed in the next microbatch, or by a program that ended; or in use
      // on another stream for longer.
      if (isAsynchronous || life.last < life.first ||
          (life.first < stepPositions) != (life.last < stepPositions))
        life = {0, memory.positions - 1};
      storage.lives = {life};
      memory.storages.push_back(storage);
      slots.push_back(slot.get());
    }
  plan::Placement placement = plan::placeStorages(memory);
  int64_t begin = reservedEnd();
  if (begin + placement.bytes > int64_t(mappedBytes))
    return;
  for (size_t i = 0; i < slots.size(); ++i)
    slots[i]->offset = begin + placement.offsets[i];
  reservedBytes = begin + placement.bytes - arenaBytes;
  keep(reservedBytes);
}

void RankArena::placeScratch() {
  // On an asynchronous device each stream has its own place: the place of
  // another stream's instruction may be in use.
  int64_t behind = reservedEnd();
  size_t numPlaces = isAsynchronous ? plan::kNumStreams : 1;
  for (size_t stream = 0; stream < numPlaces; ++stream) {
    int64_t end = behind;
    for (Site s = 0; s < sites.size(); ++s)
      if (!isAsynchronous || size_t(streamOf(s)) == stream)
        end = std::max(end, placeScratch(s, behind));
    keep(end - arenaBytes);
    behind = end;
  }
  scratchEnd = behind;
}

int64_t RankArena::placeScratch(Site site, int64_t behind) {
  plan::Memory memory;
  std::vector<Slot *> slots;
  for (auto &slot : sites[site].slots) {
    if (slot->value != -1 || slot->stays || slot->outlives)
      continue;
    plan::Storage storage;
    storage.bytes = aligned(slot->bytes);
    storage.lives = {{slot->born, std::max(slot->born, slot->died)}};
    memory.positions = std::max(memory.positions, storage.lives[0].last + 1);
    memory.storages.push_back(storage);
    slots.push_back(slot.get());
  }
  if (slots.empty())
    return behind;
  plan::Placement placement = plan::placeStorages(memory);
  int64_t top = tops.empty() ? arenaBytes : tops[size_t(positionOf(site))];
  bool isInside = !isAsynchronous && top + placement.bytes <= arenaBytes;
  int64_t begin = isInside ? top : behind;
  bool fits = begin + placement.bytes <= int64_t(mappedBytes);
  for (size_t i = 0; i < slots.size(); ++i)
    slots[i]->offset = fits ? begin + placement.offsets[i] : -1;
  return isInside || !fits ? behind : begin + placement.bytes;
}

plan::Stream RankArena::streamOf(Site site) const {
  return site < stepInputs() ? plan::instructionAt(plan, int64_t(site)).stream
                             : plan::Stream::Compute;
}

} // namespace fsdp::runtime
