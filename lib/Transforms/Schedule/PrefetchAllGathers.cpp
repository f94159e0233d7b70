//===- PrefetchAllGathers.cpp - gather before it is needed ----------------===//
//
// Latest-safe launch: a gather that is launched as late as still hides it holds
// its memory for the shortest time. All times are those of the compute stream
// without stalls.
//
//===----------------------------------------------------------------------===//
#include "StepModel.h"
#include "fsdp/Transforms/Passes.h"
#include "mlir/IR/Remarks.h"
#include "llvm/Support/FormatVariadic.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_PREFETCHALLGATHERS
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;
namespace plan = ::fsdp::plan;

namespace {
/// Of a gather's duration: how much earlier than needed it is launched.
constexpr double kReserve = 0.25;

struct Gather {
  AllGatherOp op;
  size_t begin;    ///< position in the plan
  size_t wait;     ///< that of its wait
  size_t earliest; ///< after what it needs: its unit's reshard
  int64_t bytes;   ///< that it holds
  double seconds;
};

class Prefetcher {
public:
  Prefetcher(ScheduleOp schedule, StepModel &model)
      : schedule(schedule), model(model), time(model.computeTime()),
        live(model.memory.liveBytes()) {
    findGathers();
  }

  void latestSafe() {
    std::vector<double> launch(gathers.size());
    double next = time.back();
    for (size_t k = gathers.size(); k-- > 0;) {
      Gather &gather = gathers[k];
      next =
          std::min(next, time[gather.wait]) - gather.seconds * (1 + kReserve);
      launch[k] = next;
    }
    size_t previous = 0;
    for (size_t k = 0; k < gathers.size(); ++k) {
      Gather &gather = gathers[k];
      size_t earliest = std::max(previous, gather.earliest);
      // The last instruction that begins by then.
      size_t wanted = size_t(
          std::upper_bound(time.begin(), time.end(), launch[k]) - time.begin());
      wanted = std::min(std::max<size_t>(wanted, 1) - 1, gather.begin);
      size_t at = std::max(wanted, earliest);
      const char *limit = at > wanted ? "what it needs" : "its duration";
      if (size_t fits = firstFit(gather, at); fits > at) {
        at = fits;
        limit = "the memory budget";
      }
      previous = move(gather, at, limit);
    }
  }

  void likeFSDP2() {
    for (size_t k = 1; k < gathers.size(); ++k) {
      Gather &gather = gathers[k];
      size_t at = gathers[k - 1].wait + 1;
      if (model.plan.instructions[gathers[k - 1].wait].phase !=
          model.plan.instructions[gather.wait].phase)
        at = gather.begin;
      at = std::max(at, gather.earliest);
      move(gather, firstFit(gather, at), "FSDP2's order");
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
      gathers.push_back({op, i, positions.lookup(getResultsOp(op)),
                         reshards.lookup(unit), bytes[i],
                         model.cost.instructions[i].seconds});
    }
  }

  /// The first position at or after `at` from which on the gather fits.
  size_t firstFit(const Gather &gather, size_t at) {
    std::optional<uint64_t> budget = schedule.getMemoryBudget();
    if (!budget)
      return at;
    size_t fits = gather.begin;
    while (fits > at && model.staticBytes + live[fits - 1] + gather.bytes <=
                            int64_t(*budget))
      --fits;
    return fits;
  }

  /// Launches the gather before the first instruction at or after `at` that
  /// computes for some time; returns its position.
  size_t move(Gather &gather, size_t at, const char *limit) {
    while (at < gather.begin && time[at] == time[at + 1])
      ++at;
    remark(gather, at, limit);
    if (at >= gather.begin)
      return gather.begin;
    Operation *before = model.ops[at];
    for (Value operand : gather.op.getShards()) {
      Operation *source = operand.getDefiningOp();
      if (auto copy = dyn_cast<CopyToDeviceOp>(source))
        for (Value read : copy.getShards())
          read.getDefiningOp()->moveBefore(before);
      if (isa<ReadOp, CopyToDeviceOp>(source))
        source->moveBefore(before);
    }
    gather.op->moveBefore(before);
    for (size_t i = at; i < gather.begin; ++i)
      live[i] += gather.bytes;
    return at;
  }

  void remark(Gather &gather, size_t at, const char *limit) {
    double hidden = time[gather.wait] - time[std::min(at, gather.begin)];
    auto opts = remark::RemarkOpts::name("AllGather").category("fsdp-prefetch");
    std::string text = llvm::formatv(
        "unit {0}: launched {1:F3} ms of computation before its "
        "first use, takes {2:F3} ms; limited by {3}",
        gather.op.getUnit(), hidden * 1e3, gather.seconds * 1e3, limit);
    if (hidden >= gather.seconds)
      remark::passed(gather.op.getLoc(), opts) << text;
    else
      remark::missed(gather.op.getLoc(), opts) << text;
  }

  ScheduleOp schedule;
  StepModel &model;
  std::vector<double> time;
  /// Bytes alive at each position, with the gathers launched so far.
  std::vector<int64_t> live;
  std::vector<Gather> gathers;
};

struct PrefetchAllGathers
    : mlir::fsdp::impl::PrefetchAllGathersBase<PrefetchAllGathers> {
  void runOnOperation() override {
    ModuleOp module = getOperation();
    if (!getProgram(module))
      return signalPassFailure();
    ScheduleOp schedule = getOrCreateSchedule(module);
    if (schedule.getPrefetch() == "none")
      return;
    FailureOr<StepModel> model = StepModel::build(module);
    if (failed(model))
      return signalPassFailure();
    Prefetcher prefetcher(schedule, *model);
    if (schedule.getPrefetch() == "fsdp2")
      prefetcher.likeFSDP2();
    else
      prefetcher.latestSafe();
  }
};
} // namespace
