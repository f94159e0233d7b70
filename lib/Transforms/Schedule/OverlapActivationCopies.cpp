//===- OverlapActivationCopies.cpp - copy while computation goes on -------===//
//
// The host link carries one copy in each direction at a time, in the order in
// which they begin. Times are those of the compute stream without stalls, as in
// PrefetchAllGathers.cpp.
//
//===----------------------------------------------------------------------===//
#include "StepModel.h"
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/StepProgram.h"

#include "mlir/IR/Remarks.h"
#include "llvm/Support/FormatVariadic.h"

namespace mlir::fsdp {
#define GEN_PASS_DEF_OVERLAPACTIVATIONCOPIES
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;
namespace plan = ::fsdp::plan;

namespace {
/// The fraction of a copy's duration by which it is launched earlier than
/// needed.
constexpr double kReserve = 0.25;

struct Activation {
  OffloadActivationOp out;
  WaitOp outWait;
  ReloadActivationOp in;
  WaitOp inWait;
  /// Positions in the plan: where the copy out begins and is awaited, and the
  /// copy back.
  size_t outAt, outWaitAt, inAt, inWaitAt;
  int64_t bytes; ///< on the device
  double outSeconds, inSeconds;
  /// When the copy out has ended, and when the one back has to begin.
  double gone = 0, launch = 0;
};

class Overlapper {
public:
  Overlapper(ScheduleOp schedule, StepModel &model)
      : budget(schedule.getMemoryBudget()), model(model),
        time(model.computeTime()), live(model.memory.liveBytes()) {
    findActivations();
  }

  void run() {
    findLaunches();
    keepWhatComesBackAtOnce();
    findLaunches();
    // Positions are those before anything moves.
    SmallVector<std::pair<Operation *, size_t>> moves;
    for (Activation &activation : activations)
      if (delayWait(activation))
        moves.push_back({activation.outWait, activation.outWaitAt});
    size_t previous = 0;
    for (Activation *activation : inOrderOfReturn()) {
      size_t at = findLaunch(*activation, previous);
      previous = at;
      if (at < activation->inAt)
        moves.push_back({activation->in, at});
      remark(*activation, at);
    }
    for (auto [op, at] : moves)
      op->moveBefore(model.ops[at]);
  }

private:
  void findActivations() {
    llvm::DenseMap<Operation *, size_t> positions;
    for (size_t i = 0; i < model.ops.size(); ++i)
      positions[model.ops[i]] = i;
    for (size_t i = 0; i < model.ops.size(); ++i) {
      auto out = dyn_cast<OffloadActivationOp>(model.ops[i]);
      auto outWait = out ? dyn_cast<WaitOp>(getResultsOp(out)) : WaitOp();
      if (!outWait || !outWait->hasOneUse())
        continue;
      auto in = dyn_cast<ReloadActivationOp>(*outWait->user_begin());
      auto inWait = in ? dyn_cast<WaitOp>(getResultsOp(in)) : WaitOp();
      if (!inWait)
        continue;
      size_t inAt = positions.lookup(in);
      const auto &offload =
          std::get<plan::OffloadActivation>(model.plan.instructions[i].kind);
      activations.push_back({out, outWait, in, inWait, i,
                             positions.lookup(outWait), inAt,
                             positions.lookup(inWait),
                             model.plan.values[offload.ins.front()].numBytes(),
                             model.cost.instructions[i].seconds,
                             model.cost.instructions[inAt].seconds});
    }
  }

  SmallVector<Activation *> inOrderOfReturn() {
    SmallVector<Activation *> order;
    for (Activation &activation : activations)
      order.push_back(&activation);
    llvm::sort(order,
               [](Activation *a, Activation *b) { return a->inAt < b->inAt; });
    return order;
  }

  /// Latest-safe: from the last copy to the first.
  void findLaunches() {
    double next = time.back();
    SmallVector<Activation *> order = inOrderOfReturn();
    for (Activation *activation : llvm::reverse(order)) {
      next = std::min(next, time[activation->inWaitAt]) -
             activation->inSeconds * (1 + kReserve);
      activation->launch = next;
    }
  }

  bool fits(size_t begin, size_t end, int64_t bytes) const {
    if (budget)
      for (size_t i = begin; i < end; ++i)
        if (model.staticBytes + live[i] + bytes > int64_t(*budget))
          return false;
    return true;
  }
  void hold(size_t begin, size_t end, int64_t bytes) {
    for (size_t i = begin; i < end; ++i)
      live[i] += bytes;
  }

  /// An activation that would have to come back before its copy out has ended
  /// stays on the device if there is room; the others go on the link, first
  /// come first served.
  void keepWhatComesBackAtOnce() {
    double linkFree = 0;
    llvm::erase_if(activations, [&](Activation &activation) {
      activation.gone =
          std::max(time[activation.outAt], linkFree) + activation.outSeconds;
      if (activation.gone <= activation.launch ||
          !fits(activation.outWaitAt, activation.inAt, activation.bytes)) {
        linkFree = activation.gone;
        return false;
      }
      hold(activation.outWaitAt, activation.inAt, activation.bytes);
      auto opts = remark::RemarkOpts::name("OffloadActivation")
                      .category("fsdp-offload");
      remark::missed(activation.out.getLoc(), opts)
          << llvm::formatv("an activation of {0} bytes stays: it would have to "
                           "come back {1:F3} ms before its copy out ends",
                           activation.bytes,
                           (activation.gone - activation.launch) * 1e3)
                 .str();
      keep(activation);
      return true;
    });
  }

  static void keep(Activation &activation) {
    for (auto [again, value] :
         llvm::zip(activation.inWait.getValues(), activation.out.getValues()))
      again.replaceAllUsesWith(value);
    activation.inWait.erase();
    activation.in.erase();
    activation.outWait.erase();
    activation.out.erase();
  }

  /// Whether the instruction computes, that is, is neither a copy nor a wait.
  bool takesTime(size_t at) const { return time[at + 1] > time[at]; }

  /// Where the copy out is awaited: when it has ended, or where its storage
  /// does not fit any longer. False if that is where it is.
  bool delayWait(Activation &activation) {
    size_t begin = activation.outWaitAt, at = begin;
    for (size_t i = begin + 1; i < activation.inAt; ++i) {
      if (!fits(i - 1, i, activation.bytes))
        break;
      if (!takesTime(i))
        continue;
      at = i;
      if (time[i] >= activation.gone)
        break;
    }
    hold(begin, at, activation.bytes);
    activation.outWaitAt = at;
    return at > begin;
  }

  size_t findLaunch(const Activation &activation, size_t previous) {
    size_t wanted =
        size_t(std::upper_bound(time.begin(), time.end(), activation.launch) -
               time.begin());
    wanted = std::max<size_t>(wanted, 1) - 1;
    size_t at = std::max({wanted, previous, activation.outWaitAt});
    size_t fitting = activation.inAt;
    while (fitting > at && fits(fitting - 1, fitting, activation.bytes))
      --fitting;
    at = std::max(at, fitting);
    while (at < activation.inAt && !takesTime(at))
      ++at;
    at = std::min(at, activation.inAt);
    hold(at, activation.inAt, activation.bytes);
    return at;
  }

  void remark(Activation &activation, size_t launchedAt) {
    double outHidden = time[activation.outWaitAt] - time[activation.outAt];
    double inHidden = time[activation.inWaitAt] - time[launchedAt];
    setReason(activation.out,
              llvm::formatv("its storage is given up {0:F3} ms of computation "
                            "later; takes {1:F3} ms",
                            outHidden * 1e3, activation.outSeconds * 1e3)
                  .str());
    setReason(activation.in,
              llvm::formatv("launched {0:F3} ms of computation before its "
                            "first use; takes {1:F3} ms",
                            inHidden * 1e3, activation.inSeconds * 1e3)
                  .str());
    auto opts =
        remark::RemarkOpts::name("OffloadActivation").category("fsdp-offload");
    std::string text = llvm::formatv(
        "an activation of {0} bytes: out takes {1:F3} ms with {2:F3} ms of "
        "computation beside it, back {3:F3} ms with {4:F3} ms",
        activation.bytes, activation.outSeconds * 1e3, outHidden * 1e3,
        activation.inSeconds * 1e3, inHidden * 1e3);
    if (outHidden >= activation.outSeconds && inHidden >= activation.inSeconds)
      remark::passed(activation.out.getLoc(), opts) << text;
    else
      remark::missed(activation.out.getLoc(), opts) << text;
  }

  std::optional<uint64_t> budget;
  StepModel &model;
  std::vector<double> time;
  /// Bytes alive at each position, with what has been decided so far.
  std::vector<int64_t> live;
  /// In the order in which they go.
  std::vector<Activation> activations;
};

struct OverlapActivationCopies
    : mlir::fsdp::impl::OverlapActivationCopiesBase<OverlapActivationCopies> {
  void runOnModule() override {
    ModuleOp module = getOperation();
    ProgramOp program = getProgram(module);
    if (!program)
      return signalPassFailure();
    if (getMicrobatchOps<OffloadActivationOp>(program).empty())
      return;
    ScheduleOp schedule = getOrCreateSchedule(module);
    if (schedule.getPrefetch() == "none")
      return;
    FailureOr<StepModel> model = StepModel::build(module);
    if (failed(model))
      return signalPassFailure();
    Overlapper(schedule, *model).run();
  }
};
} // namespace
