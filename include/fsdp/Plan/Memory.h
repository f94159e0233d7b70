//===- Memory.h - what a plan keeps in memory, and when -------------------===//
//
// A replay of a plan without running it: the storages that its programs make,
// each with its bytes and the positions at which it is alive, and what a rank
// keeps all the time. The layout of the arena, the statistics, the simulation
// and the scheduler all use this replay, so that they agree.
//
// Positions count the instructions of the step, then those of the evaluation.
// An instruction's operands and results are alive at its position.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_PLAN_MEMORY_H
#define FSDP_PLAN_MEMORY_H

#include "fsdp/Plan/Plan.h"

#include <array>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace fsdp::plan {

/// What memory a rank has.
enum class MemoryModel : uint8_t {
  /// Ranks of one host that share a segment (SegmentLayout.h): parameters are
  /// whole in it, once, and a gather hands out views of them; gradients are
  /// written to it where peers reduce them.
  SharedHost,
  /// A device of its own: a gather fills buffers of the rank, and gradients are
  /// reduced from where they were computed. Offloaded units are elsewhere.
  Device,
};

/// What memory is for.
enum class MemoryUse : uint8_t {
  Input,
  Activation,    ///< made in forward or made again, read in backward; of
                 ///< offloaded ones, on the device
  Temporary,     ///< any other result of a call
  Gradient,      ///< whole, of a parameter
  GradientSum,   ///< over microbatches, whole or of a shard
  GradientShard, ///< reduced
  GatheredParam, ///< whole, or kept in groups after forward; of an offloaded
                 ///< unit, shards on the device too
  // All the time:
  ParamShard, ///< and ignored parameters
  OptimizerState,
  Buffer,
  Constant,
  ReduceInput,   ///< where peers read gradients; on a device of its own a
                 ///< reduction's flat tensor, for some time
  Communication, ///< counters and the like
};
inline constexpr size_t kNumMemoryUses = size_t(MemoryUse::Communication) + 1;
/// "gathered parameters" and so on.
std::string_view memoryUseName(MemoryUse use);

/// Bytes of each use.
using BytesByUse = std::array<int64_t, kNumMemoryUses>;
int64_t sum(const BytesByUse &bytes);

/// Positions first to last, both included.
struct Life {
  int64_t first = 0;
  int64_t last = 0;
  bool overlaps(const Life &other) const {
    return first <= other.last && other.first <= last;
  }
};

/// Memory that the programs need for some time.
struct Storage {
  /// The value whose storage it is; -1 for a gathered parameter that nothing
  /// uses.
  ValueId value = -1;
  /// A multiple of arenaAlign, of kTensorAlign on the host; positive.
  int64_t bytes = 0;
  MemoryUse use = MemoryUse::Temporary;
  /// Position of the instruction that makes it; -1 for an input.
  int64_t definition = -1;
  /// When it is alive; ascending, apart.
  std::vector<Life> lives;
};

/// What a plan's step and evaluation need a place for.
struct Memory {
  /// In the order in which they are made.
  std::vector<Storage> storages;
  /// Per value: the index of its storage; -1 for one that is elsewhere: a
  /// buffer, a constant, an ignored parameter, the loss scale, what
  /// OffloadActivation copied to the host, a result of Plan::init, what has no
  /// bytes, a reduction's result that nothing uses, and, with SharedHost, what
  /// is in the segment, or, with Device, what is on the host.
  std::vector<int32_t> storageOf;
  /// Instructions of the step, and of step and evaluation.
  int64_t stepPositions = 0;
  int64_t positions = 0;

  /// Bytes alive at each position.
  std::vector<int64_t> liveBytes() const;
  /// The first position at which the most bytes are alive.
  int64_t peakPosition() const;
  /// Bytes alive at a position.
  BytesByUse usesAt(int64_t position) const;
  /// The most bytes alive at a position; 0 without positions.
  int64_t peakBytes() const;
  /// Indices of the storages alive at a position, the largest first.
  std::vector<int32_t> aliveAt(int64_t position) const;
};

/// The storages of a plan. Of the microbatches of a step it shows one that has
/// both neighbours: sums and units that stay gathered live all through it. The
/// life of a storage ends with the instruction that frees its last value, or
/// without one with its program. Expects a plan that is verified, except for
/// its arena.
Memory replayMemory(const Plan &plan, MemoryModel model);

/// The storages of offloaded activations on the host, in the same form.
/// `storageOf` is -1 for all other values.
Memory replayHostMemory(const Plan &plan);

/// What a rank keeps all the time, in bytes by MemoryUse; 0 for uses of
/// storages. A plug-in optimizer's state is unknown here and counts nothing.
/// On SharedHost a rank keeps an equal share of the segment.
BytesByUse staticBytes(const Plan &plan, MemoryModel model, int64_t rank = 0);

/// A rank's peak: what it keeps all the time and, if the plan has one, its
/// arena.
int64_t peakBytes(const Plan &plan, MemoryModel model);

/// Bytes of every use at the peak of `memory`, the plan's replay, including
/// what a rank keeps all the time; the largest first.
std::vector<std::pair<int64_t, MemoryUse>>
usesAtPeak(const Plan &plan, const Memory &memory, MemoryModel model);

/// The instruction at a position of the replay.
const Instruction &instructionAt(const Plan &plan, int64_t position);

/// Offsets for storages such that two that are alive at the same time have no
/// byte in common.
struct Placement {
  std::vector<int64_t> offsets; ///< multiples of what sizes are multiples of
  int64_t bytes = 0;            ///< the end of the last
  int64_t lowerBound = 0;       ///< most bytes alive at once
};

/// Greedy best fit over several orders; takes the best. Deterministic for the
/// same storages.
Placement placeStorages(const Memory &memory);

/// Places all storages of the plan, those on the host too: sets Plan::arena,
/// Plan::hostArena and Value::offset. On Device the plan gets buffers first
/// (DeviceBuffers.h).
void layOutArena(Plan &plan, MemoryModel model);

/// Device if a gathered parameter has a place in the arena.
MemoryModel arenaModel(const Plan &plan);

/// What offsets in the plan's arena are multiples of, as the addresses that
/// PyTorch's allocator gives out on the device: kTensorAlign, and 512 for a
/// plan that was captured for a GPU, whose libraries choose kernels by it.
int64_t arenaAlign(const Plan &plan);

} // namespace fsdp::plan

#endif // FSDP_PLAN_MEMORY_H
