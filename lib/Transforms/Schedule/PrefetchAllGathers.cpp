//===- PrefetchAllGathers.cpp - gather before it is needed ----------------===//
//
// Turns the step into numbers, for LatestSafeLaunch.h to decide on, and moves
// gathers there.
//
//===----------------------------------------------------------------------===//
#include "LatestSafeLaunch.h"
#include "StepModel.h"
#include "fsdp/Simulate/Format.h"
#include "fsdp/Simulate/LowerBound.h"
#include "fsdp/Simulate/Simulator.h"
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/StepProgram.h"
#include "mlir/IR/Remarks.h"
#include "llvm/Support/FormatVariadic.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_PREFETCHALLGATHERS
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;
using namespace ::fsdp::schedule;
namespace plan = ::fsdp::plan;
namespace simulate = ::fsdp::simulate;

namespace {
/// The fraction of a gather's duration by which it is launched earlier than
/// needed.
constexpr double kReserve = 0.25;

/// Why a gather is not launched earlier, or later, for people.
std::string describeLimit(const Launch &launch, ScheduleOp schedule) {
  switch (launch.limit) {
  case LaunchLimit::Duration:
    return "its duration";
  case LaunchLimit::StepBegin:
    return "the beginning of the step";
  case LaunchLimit::Link:
    return "the gather before it, which has the link until then";
  case LaunchLimit::Needs:
    return "what it needs: its unit is resharded before";
  case LaunchLimit::Order:
    return "the launch of the gather before it";
  case LaunchLimit::Budget:
    return llvm::formatv("the memory budget of {0}: launched earlier, {1} "
                         "would be alive",
                         simulate::formatBytes(*schedule.getMemoryBudget()),
                         simulate::formatBytes(launch.excess));
  case LaunchLimit::FSDP2:
    return "FSDP2's order";
  }
  llvm_unreachable("every limit has a text");
}

class Prefetcher {
public:
  Prefetcher(ScheduleOp schedule, StepModel &model)
      : schedule(schedule), model(model) {
    problem.time = model.computeTime();
    problem.live = model.memory.liveBytes();
    problem.live.resize(model.plan.instructions.size());
    for (int64_t &bytes : problem.live)
      bytes += model.staticBytes;
    if (std::optional<uint64_t> budget = schedule.getMemoryBudget())
      problem.budget = int64_t(*budget);
    problem.reserve = kReserve;
    findGathers();
  }

  void run() {
    std::vector<Launch> launches = schedule.getPrefetch() == "fsdp2"
                                       ? fsdp2Launches(problem)
                                       : latestSafeLaunches(problem);
    for (auto [gather, numbers, launch] :
         llvm::zip(gathers, problem.gathers, launches)) {
      explain(gather, numbers, launch);
      if (launch.at < numbers.latest)
        moveBefore(gather, model.ops[launch.at]);
    }
  }

private:
  void findGathers() {
    const auto &instructions = model.plan.instructions;
    llvm::DenseMap<Operation *, size_t> positions;
    for (size_t i = 0; i < instructions.size(); ++i)
      positions[model.ops[i]] = i;
    std::vector<int64_t> bytes(instructions.size());
    for (const plan::Storage &storage : model.memory.storages)
      if (storage.use == plan::MemoryUse::GatheredParam &&
          storage.definition >= 0 &&
          size_t(storage.definition) < instructions.size())
        bytes[size_t(storage.definition)] += storage.bytes;
    llvm::DenseMap<int32_t, size_t> reshards;
    for (size_t i = 0; i < instructions.size(); ++i) {
      if (auto *reshard = std::get_if<plan::Reshard>(&instructions[i].kind))
        reshards[reshard->unit] = i + 1;
      auto op = dyn_cast<AllGatherOp>(model.ops[i]);
      if (!op || instructions[i].stream == plan::Stream::Compute)
        continue;
      int32_t unit = std::get<plan::AllGather>(instructions[i].kind).unit;
      gathers.push_back(op);
      problem.gathers.push_back(
          {model.cost.instructions[i].seconds, bytes[i], reshards.lookup(unit),
           i, positions.lookup(getResultsOp(op)), int(instructions[i].phase)});
    }
  }

  /// With the reads and copies of what it gathers.
  static void moveBefore(AllGatherOp gather, Operation *before) {
    for (Value operand : gather.getShards()) {
      Operation *source = operand.getDefiningOp();
      if (auto copy = dyn_cast<CopyToDeviceOp>(source))
        for (Value read : copy.getShards())
          read.getDefiningOp()->moveBefore(before);
      if (isa<ReadOp, CopyToDeviceOp>(source))
        source->moveBefore(before);
    }
    gather->moveBefore(before);
  }

  void explain(AllGatherOp gather, const GatherToLaunch &numbers,
               const Launch &launch) {
    std::string limit = describeLimit(launch, schedule);
    setReason(gather,
              launch.at < numbers.latest
                  ? "launched ahead of its first use; limited by " + limit
                  : "launched where it is needed; limited by " + limit);
    double ahead = problem.time[numbers.use] - problem.time[launch.at];
    auto opts = remark::RemarkOpts::name("AllGather").category("fsdp-prefetch");
    auto message = launch.stall > 0 ? remark::missed(gather.getLoc(), opts)
                                    : remark::passed(gather.getLoc(), opts);
    if (message)
      message << llvm::formatv(
                     "unit {0}: launched {1:F3} ms of computation before its "
                     "first use, takes {2:F3} ms{3}; limited by {4}",
                     gather.getUnit(), ahead * 1e3, numbers.seconds * 1e3,
                     launch.stall > 0
                         ? llvm::formatv(", compute waits {0:F3} ms",
                                         launch.stall * 1e3)
                               .str()
                         : "",
                     limit)
                     .str();
  }

  ScheduleOp schedule;
  StepModel &model;
  /// The gathers beside computation, and the same in numbers.
  SmallVector<AllGatherOp> gathers;
  LaunchProblem problem;
};

struct PrefetchAllGathers
    : mlir::fsdp::impl::PrefetchAllGathersBase<PrefetchAllGathers> {
  void runOnModule() override {
    ModuleOp module = getOperation();
    ProgramOp program = getProgram(module);
    if (!program)
      return signalPassFailure();
    ScheduleOp schedule = getOrCreateSchedule(module);
    if (schedule.getPrefetch() == "none") {
      for (auto gather : getMicrobatchOps<AllGatherOp>(program))
        setReason(gather, "launched where it is needed: nothing is prefetched");
    } else {
      FailureOr<StepModel> model = StepModel::build(module);
      if (failed(model))
        return signalPassFailure();
      Prefetcher(schedule, *model).run();
    }
    if (failed(remarkStep(schedule)))
      return signalPassFailure();
  }

private:
  /// The step as it is now, against what no schedule can beat.
  LogicalResult remarkStep(ScheduleOp schedule) {
    auto message = remark::analysis(
        schedule.getLoc(),
        remark::RemarkOpts::name("Step").category("fsdp-prefetch"));
    if (!message)
      return success();
    FailureOr<StepModel> model = StepModel::build(getOperation());
    if (failed(model))
      return failure();
    simulate::Timeline timeline =
        simulate::simulate(model->plan, model->cost, model->device);
    message << "step of " + simulate::formatMilliseconds(timeline.seconds) +
                   ", " +
                   simulate::describeGap(simulate::lowerBound(model->plan,
                                                              model->cost,
                                                              model->device),
                                         timeline.seconds);
    return success();
  }
};
} // namespace
