//===- RankArena.h - the memory in which a rank executes ------------------===//
//
// One mapping. It begins with the plan's arena, at whose offsets operators
// write their results from the first step on. Behind it is room for everything
// else that they allocate; this room grows as needed, and is kept. These
// allocations are measured, and have a place from the next step on:
//
//   scratch, which ends with its instruction: one place behind the arena that
//     all instructions use, or where the arena has nothing alive at that
//     position;
//   what outlives its instruction though the plan has no place for it: between
//     the arena and the scratch, laid out by its lives.
//
// So a step makes the same allocations at the same addresses as the one before,
// and none in the heap. Whatever a step allocates differently gets the lowest
// free room behind the arena: an allocation is recognised by its instruction,
// size and order, and memory is not given out while something in it is alive.
// Allocations of threads that do not execute an instruction come from the heap.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_MEMORY_RANKARENA_H
#define FSDP_RUNTIME_MEMORY_RANKARENA_H

#include "fsdp/Plan/Memory.h"
#include "fsdp/Runtime/Devices/Device.h"
#include "fsdp/Runtime/Devices/SteeredAllocator.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace fsdp::runtime {

/// Needs installSteeredAllocator; without it, the arena serves nothing. Threads
/// may execute different sites concurrently; any thread may free tensors.
class RankArena final : private AllocationSource {
public:
  /// Borrows plan and device. `shardIndex`: of this rank in its replica. Throws
  /// RunError where there is not enough memory.
  RankArena(const plan::Plan &plan, int64_t shardIndex, Device &device);
  RankArena(const RankArena &) = delete;
  RankArena &operator=(const RankArena &) = delete;
  /// Leaves the memory as it is if a tensor in it is alive.
  ~RankArena();

  /// What allocates: a position of plan::Memory, or the creation of a program's
  /// inputs.
  using Site = size_t;
  Site stepInputs() const { return sites.size() - 2; }
  Site evaluationInputs() const { return sites.size() - 1; }

  /// While alive, this thread's allocations are those of `site`.
  class Scope {
  public:
    Scope(RankArena &arena, Site site)
        : use(arena, arena.device.where().type()) {
      arena.begin(site);
    }

  private:
    UseAllocationSource use;
  };

  /// To be called within the scope, when the site's values exist: remembers
  /// which allocations became theirs, and moves results of an operator that lie
  /// at a wrong place because the guess was wrong. A value that, against the
  /// plan, shares storage with another one at a place that is not its own
  /// becomes a copy.
  void settle(std::vector<at::Tensor> &values);

  /// After a program, when its values are gone: gives places to what was
  /// measured.
  void endProgram();

  const std::shared_ptr<DeviceMemory> &deviceMemory() const { return memory; }
  /// The bytes of the plan's arena; and the most bytes so far of what lies
  /// behind it.
  int64_t bytes() const { return arenaBytes; }
  int64_t extraBytes() const { return keptBytes; }

  /// An allocation that a site makes in every step.
  struct Slot {
    size_t bytes = 0;
    /// The value whose storage it becomes, which has a place in the arena.
    plan::ValueId value = -1;
    /// For any other allocation: its place; -1 before it has one.
    int64_t offset = -1;
    Site site = 0;
    /// The run of its site that made the last.
    uint64_t run = 0;
    /// It is not freed yet.
    bool alive = false;
    /// The allocations and releases in the site's run before this allocation,
    /// and before its release.
    int64_t born = 0;
    int64_t died = 0;
    /// Position where it was freed, if not in its site.
    bool outlives = false;
    int64_t freedAt = -1;
    /// It was alive after its program: it comes from the heap from then on.
    bool stays = false;
  };
  /// Notes that a slot's memory is free. Called with the lock of the live slots
  /// held.
  void released(Slot &slot);

private:
  struct Expected {
    plan::ValueId value;
    size_t bytes; ///< of this rank
    uint64_t run = 0;
  };
  struct SiteState {
    std::vector<Expected> values;
    std::vector<std::unique_ptr<Slot>> slots;
    size_t next = 0;
    uint64_t run = 0;
    int64_t ticks = 0;
    /// Where the next slot without a place goes.
    int64_t unmeasured = 0;
  };

  void begin(Site site);
  c10::DataPtr allocate(size_t bytes) override;
  Slot &match(size_t bytes);
  std::byte *placeOf(const Slot &slot);
  bool isCall(Site site) const;
  // With the lock of the live ones held:
  static bool isTaken(const std::byte *place, size_t bytes);
  /// Moves what a slot of a value holds from an address to the value's place,
  /// if that is free. Only for an operator's result, whose address nobody else
  /// knows yet.
  void move(const at::Tensor &tensor, std::byte *from);
  /// The lowest room behind the reserved places; null if there is none.
  std::byte *findRoom(size_t bytes);
  /// Counts so many bytes behind the arena as allocated.
  void keep(int64_t bytes);
  /// What is alive after its program is never given out.
  void keepStaying();
  void expectValues(const plan::Plan &plan, int64_t shardIndex);
  void findTops(const plan::Plan &plan);
  void placeSurvivors();
  void placeScratch();
  /// Places the scratch of a site, behind `behind` if it has to lie there;
  /// returns its end.
  int64_t placeScratch(Site site, int64_t behind);
  plan::Stream streamOf(Site site) const;
  int64_t positionOf(Site site) const;
  /// The next multiple of the device's alignment.
  int64_t aligned(size_t bytes) const;
  /// Where memory behind what the plan and survivors take begins.
  int64_t reservedEnd() const;

  const plan::Plan &plan;
  std::vector<SiteState> sites;
  /// The site of this thread.
  static thread_local Site current;
  /// Per position: the end of what is alive in the arena.
  std::vector<int64_t> tops;
  int64_t stepPositions = 0;
  int64_t arenaBytes = 0;
  int64_t reservedBytes = 0;
  int64_t keptBytes = 0;
  /// The end of all scratch in the device's memory.
  int64_t scratchEnd = 0;
  /// Something was allocated that has no place yet.
  bool measured = false;
  Device &device;
  /// The device executes what was submitted while the host, by whose clock this
  /// class works, has already moved on: memory that the host has freed may
  /// still be in use.
  const bool isAsynchronous;
  const int64_t alignment; ///< of what the plan does not place
  std::shared_ptr<DeviceMemory> memory;
  std::byte *base = nullptr;
  size_t mappedBytes = 0;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_MEMORY_RANKARENA_H
