//===- ExploreMemory.h - time against memory of a step --------------------===//
//
// What a step costs under other choices of what is kept: each choice is
// compiled like the module itself, and its step is simulated and its memory
// laid out.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_TRANSFORMS_EXPLOREMEMORY_H
#define FSDP_TRANSFORMS_EXPLOREMEMORY_H

#include "fsdp/Dialect/FSDP.h"
#include "fsdp/Simulate/DeviceModel.h"
#include "fsdp/Simulate/Format.h"
#include "fsdp/Simulate/LowerBound.h"

#include <optional>
#include <string>

namespace mlir::fsdp {

/// What is kept between forward and backward in the model's blocks: the largest
/// set of units that have parameters of the same types.
struct MemoryChoice {
  enum class Reshard : uint8_t {
    Policy, ///< as the units say
    Keep,   ///< parameters stay gathered
    Host,   ///< the ranks of a host keep them between them (hpZ)
  };
  enum class Recompute : uint8_t {
    Products, ///< all activations but the results of plan::isProduct
    /// None: activations of at least kMinOffload bytes are on the host
    /// meanwhile.
    Offload,
    Full, ///< all activations
  };
  /// Which blocks recompute, which decides where the peak is.
  enum class Which : uint8_t { First, Last, Spread };
  Reshard reshard = Reshard::Policy;
  Recompute recompute = Recompute::Products;
  /// How many blocks recompute or offload.
  int64_t blocks = 0;
  Which which = Which::First;
  /// Reduce-scatters in flight; 0: as the schedule says.
  int64_t inFlight = 0;

  bool operator==(const MemoryChoice &) const = default;
};

/// Bytes of an activation below which a copy is not worth its latency.
inline constexpr int64_t kMinOffload = 1 << 20;

struct MemoryOutcome {
  MemoryChoice choice;
  double seconds = 0; ///< of a simulated step
  int64_t bytes = 0;  ///< a rank's peak
};

/// Compiles copies of a module whose units are assigned.
class MemoryExplorer {
public:
  /// Errors name the description of the schedule's device.
  static FailureOr<MemoryExplorer> create(ModuleOp module);

  int64_t numBlocks() const { return int64_t(blocks.size()); }
  /// Choices of resharding and recomputation that this module has.
  ArrayRef<MemoryChoice::Reshard> reshards() const { return reshardKinds; }
  ArrayRef<MemoryChoice::Recompute> recomputations() const {
    return recomputeKinds;
  }
  /// The same for MemoryChoice::inFlight, the fewest first.
  ArrayRef<int64_t> reducesInFlight() const { return inFlightKinds; }
  /// The outcome of a choice, computed once.
  FailureOr<MemoryOutcome> evaluate(const MemoryChoice &choice);
  /// Changes the module itself.
  void apply(const MemoryChoice &choice);
  /// "recompute 8 of 32 blocks but matrix products, keep parameters gathered".
  std::string describe(const MemoryChoice &choice) const;
  /// A lower bound on the time of every choice: that of the first evaluated
  /// step, without what is recomputed, gathered and copied again
  /// (simulate::lowerBound). What a recomputation leaves out of the kernels
  /// that fuse_pointwise makes does count.
  const ::fsdp::simulate::LowerBound &bound() const { return leastTime; }
  /// By how much an outcome is above that, in percent.
  double gapPercent(const MemoryOutcome &outcome) const;
  /// The largest that are alive at the peak of the last choice evaluated.
  const std::string &holders() const { return peakHolders; }
  /// All outcomes so far.
  ArrayRef<MemoryOutcome> outcomes() const { return known; }

private:
  MemoryExplorer(ModuleOp module, ::fsdp::simulate::DeviceModel device);
  void apply(ModuleOp to, const MemoryChoice &choice) const;
  /// Whether the blocks have calls for Recompute::Products to keep.
  bool hasProducts() const;

  ModuleOp module;
  ::fsdp::simulate::DeviceModel device;
  SmallVector<StringAttr> blocks;
  /// FSDP's ranks on one host.
  int64_t perHost = 1;
  SmallVector<MemoryChoice::Reshard> reshardKinds;
  SmallVector<MemoryChoice::Recompute> recomputeKinds;
  SmallVector<int64_t> inFlightKinds;
  SmallVector<MemoryOutcome> known;
  std::string peakHolders;
  ::fsdp::simulate::LowerBound leastTime;
};

/// A grid of choices, and the choices that differ in one thing from those on
/// the grid's Pareto front.
FailureOr<SmallVector<MemoryOutcome>> exploreMemory(MemoryExplorer &explorer);
/// Puts those that no other beats in both time and memory first, in the order
/// of increasing memory; returns how many they are.
size_t sortByParetoFront(SmallVectorImpl<MemoryOutcome> &outcomes);
/// The fastest outcome within a budget of bytes, by compiling few choices; none
/// if nothing fits.
FailureOr<std::optional<MemoryOutcome>> findFastest(MemoryExplorer &explorer,
                                                    int64_t budget);

using ::fsdp::simulate::formatBytes;

} // namespace mlir::fsdp

#endif // FSDP_TRANSFORMS_EXPLOREMEMORY_H
