//===- ExploreBuckets.cpp - what to gather and reduce together ------------===//
#include "fsdp/Transforms/ExploreBuckets.h"

#include "BucketModel.h"
#include "Buckets.h"
#include "fsdp/Simulate/Format.h"
#include "fsdp/Transforms/CompileStep.h"
#include "fsdp/Transforms/Schedule.h"
#include "llvm/ADT/MapVector.h"

using namespace mlir;
using namespace mlir::fsdp;
namespace simulate = ::fsdp::simulate;

/// How many partitions of the model's front are compiled.
constexpr size_t kCompiled = 3;
/// Partitions that differ by less in time and memory count as one.
constexpr double kEpsilon = 1e-3;
/// Buckets of several parameters that are tried have at most so many bytes, or
/// so many times those of the largest unit.
constexpr double kLeastLimit = 500e6;
constexpr double kLargestUnits = 2;
/// Times closer than this are the same.
constexpr double kSameTime = 1e-4;

static SmallVector<SmallVector<StringAttr>> getNames(ArrayRef<Bucket> buckets) {
  SmallVector<SmallVector<StringAttr>> names;
  for (const Bucket &bucket : buckets)
    names.push_back(bucket.params);
  return names;
}

namespace {
class BucketExplorer {
public:
  BucketExplorer(ModuleOp module, const simulate::DeviceModel &device)
      : module(module), device(device), ofUnits(splitUnits(module)),
        ofModule(ofUnits) {
    llvm::DenseMap<StringAttr, size_t> order;
    for (auto param : module.getOps<ParamOp>())
      order.try_emplace(param.getSymNameAttr(), order.size());
    llvm::sort(ofModule, [&](const Bucket &a, const Bucket &b) {
      return order.lookup(a.params.front()) < order.lookup(b.params.front());
    });
  }

  FailureOr<SmallVector<BucketOutcome>> run() {
    double saturation = getSaturatingBytes(module, device);
    if (failed(evaluate("unit", {})))
      return failure();
    if (ofUnits.empty())
      return std::move(outcomes);
    auto step = evaluate("parameter", getNames(ofUnits));
    if (failed(step) ||
        failed(
            evaluate("saturation", getNames(fillBuckets(module, saturation)))))
      return failure();
    if (failed(evaluateFront(*step, ofModule, kCompiled)) ||
        failed(evaluateFront(*step, ofUnits, 1)))
      return failure();
    useLeastBound();
    return std::move(outcomes);
  }

private:
  /// An outcome, unless one with these buckets is there.
  FailureOr<CompiledStep>
  evaluate(StringRef name, SmallVector<SmallVector<StringAttr>> buckets) {
    BucketOutcome outcome;
    outcome.name = name;
    outcome.buckets = std::move(buckets);
    if (!outcome.buckets.empty() &&
        llvm::any_of(outcomes, [&](const BucketOutcome &other) {
          return other.buckets == outcome.buckets;
        }))
      return CompiledStep();
    FailureOr<CompiledStep> step =
        compileStep(module, device, [&](ModuleOp copy) {
          getOrCreateSchedule(copy).setBucket("unit");
          applyBuckets(copy, outcome);
        });
    if (failed(step))
      return failure();
    outcome.count = int64_t(step->plan.units.size());
    outcome.seconds = step->seconds;
    outcome.exposed = step->exposed;
    outcome.bytes = step->bytes;
    outcome.holders = step->holders;
    outcome.bound = simulate::lowerBound(step->plan, step->cost, device);
    outcomes.push_back(std::move(outcome));
    return step;
  }

  /// No choice among the candidates takes less than the least of their bounds.
  void useLeastBound() {
    simulate::LowerBound least = outcomes.front().bound;
    for (const BucketOutcome &outcome : outcomes)
      if (outcome.bound.seconds < least.seconds)
        least = outcome.bound;
    for (BucketOutcome &outcome : outcomes)
      outcome.bound = least;
  }

  /// Some partitions of the model's front that fit into the budget by the
  /// model, or the smallest: both ends, and what lies evenly between; the
  /// fastest if it is one.
  LogicalResult evaluateFront(const CompiledStep &step, ArrayRef<Bucket> parts,
                              size_t most) {
    std::vector<BucketPartition> front = findFront(step, parts);
    std::optional<uint64_t> budget =
        getOrCreateSchedule(module).getMemoryBudget();
    auto fits = llvm::find_if(front, [&](const BucketPartition &partition) {
      return !budget || partition.peak <= int64_t(*budget);
    });
    front.erase(front.begin(), fits == front.end() ? fits - 1 : fits);
    size_t count = std::min(most, front.size());
    for (size_t i = 0; i < count; ++i) {
      size_t at = count > 1 ? i * (front.size() - 1) / (count - 1) : 0;
      if (failed(evaluate("optimal", getNames(join(parts, front[at])))))
        return failure();
    }
    return success();
  }

  std::vector<BucketPartition> findFront(const CompiledStep &step,
                                         ArrayRef<Bucket> parts) const {
    llvm::StringMap<int32_t> itemOf;
    SmallVector<int32_t> kinds;
    SmallVector<const Bucket *> first; // of each kind
    double largest = 0;
    for (auto [index, part] : llvm::enumerate(parts)) {
      for (StringAttr param : part.params)
        itemOf[param.getValue()] = int32_t(index);
      size_t kind = 0;
      while (kind < first.size() && !canJoin(module, *first[kind], part))
        ++kind;
      if (kind == first.size())
        first.push_back(&part);
      kinds.push_back(int32_t(kind));
    }
    for (auto &[unit, params] : getUnitParams(module)) {
      double bytes = 0;
      for (const Bucket &part : parts)
        bytes += part.units.contains(unit) ? part.bytes : 0;
      largest = std::max(largest, bytes);
    }
    BucketProblem problem =
        modelBuckets(step, device, itemOf, kinds,
                     getOrCreateSchedule(module).getNumReducesInFlight());
    problem.mostBytes = std::max(kLeastLimit, kLargestUnits * largest);
    return findBucketsOfBlocks(problem, kEpsilon);
  }

  static SmallVector<Bucket> join(ArrayRef<Bucket> parts,
                                  const BucketPartition &partition) {
    SmallVector<Bucket> buckets;
    auto next = partition.begins.begin();
    for (auto [index, part] : llvm::enumerate(parts)) {
      if (next != partition.begins.end() && *next == int32_t(index)) {
        buckets.push_back(part);
        ++next;
      } else {
        mlir::fsdp::join(buckets.back(), part);
      }
    }
    return buckets;
  }

  ModuleOp module;
  const simulate::DeviceModel &device;
  /// What stays together, in the order of units and in that of the module: the
  /// root unit's parameters may stand before and behind those of others, where
  /// the model, which takes them as used together, is good enough for a guess.
  SmallVector<Bucket> ofUnits, ofModule;
  SmallVector<BucketOutcome> outcomes;
};
} // namespace

FailureOr<SmallVector<BucketOutcome>>
mlir::fsdp::exploreBuckets(ModuleOp module,
                           const simulate::DeviceModel &device) {
  return BucketExplorer(module, device).run();
}

const BucketOutcome *mlir::fsdp::chooseBuckets(ArrayRef<BucketOutcome> outcomes,
                                               std::optional<uint64_t> budget) {
  auto fits = [&](const BucketOutcome &outcome) {
    return !budget || outcome.bytes <= int64_t(*budget);
  };
  double fastest = std::numeric_limits<double>::infinity();
  for (const BucketOutcome &outcome : outcomes)
    if (fits(outcome))
      fastest = std::min(fastest, outcome.seconds);
  const BucketOutcome *best = nullptr;
  for (const BucketOutcome &outcome : outcomes)
    if (fits(outcome) && outcome.seconds <= fastest * (1 + kSameTime) &&
        (!best || outcome.bytes < best->bytes))
      best = &outcome;
  return best;
}

std::string mlir::fsdp::describe(const BucketOutcome &outcome) {
  return outcome.name + ", " + std::to_string(outcome.count) +
         (outcome.count == 1 ? " bucket: " : " buckets: ") +
         simulate::formatMilliseconds(outcome.seconds) + ", " +
         simulate::formatMilliseconds(outcome.exposed) + " of it exposed, " +
         simulate::formatBytes(outcome.bytes);
}

void mlir::fsdp::applyBuckets(ModuleOp module, const BucketOutcome &outcome) {
  if (outcome.buckets.empty())
    return;
  llvm::StringMap<Bucket> partOf;
  for (const Bucket &part : splitUnits(module))
    partOf[part.params.front().getValue()] = part;
  SmallVector<Bucket> buckets;
  for (ArrayRef<StringAttr> params : outcome.buckets) {
    buckets.push_back(partOf.lookup(params.front().getValue()));
    for (StringAttr param : params.drop_front())
      if (auto part = partOf.find(param.getValue()); part != partOf.end())
        join(buckets.back(), part->second);
  }
  replaceUnits(module, buckets);
}
