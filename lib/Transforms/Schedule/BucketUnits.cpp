//===- BucketUnits.cpp - what is gathered and reduced together ------------===//
#include "Buckets.h"
#include "fsdp/Simulate/Format.h"
#include "fsdp/Transforms/ExploreBuckets.h"
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/Schedule.h"
#include "mlir/IR/Remarks.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_BUCKETUNITS
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;
namespace simulate = ::fsdp::simulate;

namespace {
remark::RemarkOpts remarkOf(StringRef name) {
  return remark::RemarkOpts::name(name).category("fsdp-bucket");
}

struct BucketUnits : mlir::fsdp::impl::BucketUnitsBase<BucketUnits> {
  void runOnModule() override {
    ModuleOp module = getOperation();
    ScheduleOp schedule = getOrCreateSchedule(module);
    StringRef policy = schedule.getBucket();
    if (policy == "unit")
      return;
    auto device = loadDevice(module);
    if (failed(device))
      return signalPassFailure();
    if (policy == "parameter")
      fill(module, schedule, 0);
    else if (policy == "saturation")
      fill(module, schedule, getSaturatingBytes(module, *device));
    else if (failed(choose(module, schedule, *device)))
      signalPassFailure();
  }

private:
  static void fill(ModuleOp module, ScheduleOp schedule, double least) {
    SmallVector<Bucket> buckets = fillBuckets(module, least);
    replaceUnits(module, buckets);
    remark::passed(schedule.getLoc(), remarkOf("Buckets"))
        << std::to_string(buckets.size()) + " buckets of at least " +
               std::to_string(int64_t(least)) + " bytes where neighbours allow";
  }

  static LogicalResult choose(ModuleOp module, ScheduleOp schedule,
                              const simulate::DeviceModel &device) {
    auto outcomes = exploreBuckets(module, device);
    if (failed(outcomes))
      return failure();
    std::optional<uint64_t> budget = schedule.getMemoryBudget();
    const BucketOutcome *best = chooseBuckets(*outcomes, budget);
    if (!best) {
      for (const BucketOutcome &outcome : *outcomes)
        if (!best || outcome.bytes < best->bytes)
          best = &outcome;
      return schedule.emitOpError("expected a step of at most ")
             << simulate::formatBytes(int64_t(*budget))
             << " a rank, got with the smallest of all buckets: "
             << describe(*best) << "; at its peak " << best->holders;
    }
    for (const BucketOutcome &outcome : *outcomes)
      if (&outcome != best)
        remark::analysis(schedule.getLoc(), remarkOf("BucketCandidate"))
            << describe(outcome);
    std::string limit;
    if (budget)
      limit = " of " + simulate::formatBytes(int64_t(*budget));
    remark::passed(schedule.getLoc(), remarkOf("Buckets"))
        << describe(*best) + limit + "; " +
               simulate::describeGap(best->bound, best->seconds);
    applyBuckets(module, *best);
    return success();
  }
};
} // namespace
