//===- ExploreMemory.h - time against memory of a step --------------------===//
//
// What a step costs under other choices of what is kept: each is compiled like
// the module itself, simulated, and its memory laid out.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_TRANSFORMS_EXPLOREMEMORY_H
#define FSDP_TRANSFORMS_EXPLOREMEMORY_H

#include "fsdp/Dialect/FSDP.h"
#include "fsdp/Simulate/DeviceModel.h"
#include "fsdp/Simulate/Format.h"

#include <string>

namespace mlir::fsdp {

/// What is kept between forward and backward in the model's blocks: the units
/// with parameters of the same types that are most.
struct MemoryChoice {
  enum class Reshard : uint8_t {
    Policy, ///< as the units say
    Keep,   ///< parameters stay gathered
    Host,   ///< the ranks of a host keep them between them (hpZ)
  };
  enum class Recompute : uint8_t {
    Products, ///< all activations but results of matrix products and attention
    Full,     ///< all activations
  };
  Reshard reshard = Reshard::Policy;
  Recompute recompute = Recompute::Products;
  /// So many blocks recompute, from the first on.
  int64_t blocks = 0;

  bool operator==(const MemoryChoice &) const = default;
};

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
  /// The outcome of a choice, computed once.
  FailureOr<MemoryOutcome> evaluate(const MemoryChoice &choice);
  /// Changes the module itself.
  void apply(const MemoryChoice &choice);
  /// "recompute 8 of 32 blocks but matrix products, keep parameters gathered".
  std::string describe(const MemoryChoice &choice) const;
  /// The largest that are alive at the peak of the last choice evaluated.
  const std::string &holders() const { return peakHolders; }
  /// All outcomes so far.
  ArrayRef<MemoryOutcome> outcomes() const { return known; }

private:
  MemoryExplorer(ModuleOp module, ::fsdp::simulate::DeviceModel device);
  void apply(ModuleOp to, const MemoryChoice &choice) const;
  /// Fills `products`.
  void findProducts();

  ModuleOp module;
  ::fsdp::simulate::DeviceModel device;
  SmallVector<StringAttr> blocks;
  SmallVector<MemoryChoice::Reshard> reshardKinds;
  SmallVector<MemoryChoice::Recompute> recomputeKinds;
  /// Operators of a block whose results Recompute::Products keeps.
  SmallVector<StringRef> products;
  SmallVector<MemoryOutcome> known;
  std::string peakHolders;
};

/// A grid of choices; those that no other beats in both time and memory first,
/// from the least memory on.
FailureOr<SmallVector<MemoryOutcome>> exploreMemory(MemoryExplorer &explorer);
/// How many of exploreMemory's outcomes are such.
size_t sortByParetoFront(SmallVectorImpl<MemoryOutcome> &outcomes);

using ::fsdp::simulate::formatBytes;

} // namespace mlir::fsdp

#endif // FSDP_TRANSFORMS_EXPLOREMEMORY_H
