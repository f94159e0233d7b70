//===- AssignStreams.cpp - streams and events of a program's ops ----------===//
#include "fsdp/Transforms/AssignStreams.h"
#include "fsdp/Plan/Plan.h"
#include "fsdp/Transforms/Passes.h"
#include "fsdp/Transforms/StepProgram.h"

#include "llvm/ADT/DenseMap.h"
#include "llvm/ADT/SetVector.h"
#include "llvm/ADT/TypeSwitch.h"

#include <array>

namespace mlir::fsdp {
#define GEN_PASS_DEF_ASSIGNSTREAMS
#include "fsdp/Transforms/Passes.h.inc"
} // namespace mlir::fsdp

using namespace mlir;
using namespace mlir::fsdp;
namespace plan = ::fsdp::plan;

/// The stream of a kind of collective or copy.
static plan::Stream getStream(Operation *op) {
  return llvm::TypeSwitch<Operation *, plan::Stream>(op)
      .Case<AllGatherOp>([](auto) { return plan::AllGather::ownStream; })
      .Case<ReduceScatterOp>(
          [](auto) { return plan::ReduceScatter::ownStream; })
      .Case<AllReduceOp>([](auto) { return plan::AllReduce::ownStream; })
      .Case<CopyToDeviceOp>([](auto) { return plan::CopyToDevice::ownStream; })
      .Case<CopyToHostOp>([](auto) { return plan::CopyToHost::ownStream; })
      .Case<OffloadActivationOp>(
          [](auto) { return plan::OffloadActivation::ownStream; })
      .Case<ReloadActivationOp>(
          [](auto) { return plan::ReloadActivation::ownStream; })
      .Case<StageStateOp>([](auto) { return plan::StageState::ownStream; })
      .Default([](auto) { return plan::Stream::Compute; });
}

/// Whether the op runs beside computation.
static bool isAsynchronous(Operation *op) {
  // A copy does if the gather of the copies does.
  Operation *collective = op;
  if (isa<CopyToDeviceOp>(op) && !op->use_empty())
    collective = *op->user_begin();
  auto asynchronous = dyn_cast<CollectiveOpInterface>(collective);
  return asynchronous && asynchronous.hasFuture();
}

/// Whether the op becomes an instruction.
static bool isInstruction(Operation *op) {
  if (auto read = dyn_cast<ReadOp>(op))
    return !isa<ShardedType>(read.getResult().getType());
  return !isa<PhaseOp, NoGradientOp, GradientsOp, AllocateOp, FreeOp, ReturnOp,
              MicrobatchesOp, YieldOp>(op);
}

namespace {
/// The microbatches that differ in what runs: the first, those between, and the
/// last. What stands behind the loop follows the last.
enum Microbatch : uint8_t { First, Middle, Last };
constexpr size_t kNumMicrobatches = 3;

class StreamAssigner {
public:
  void run(ProgramOp program) {
    loop = getMicrobatches(program);
    for (Operation &op : program.getBody().front())
      if (&op == loop) {
        for (Operation &inside : llvm::make_early_inc_range(*loop.getBlock()))
          assign(&inside);
      } else {
        assign(&op);
      }
    for (auto &[op, events] : waits)
      op->setDiscardableAttr(waitsAttrName,
                             DenseI32ArrayAttr::get(op->getContext(), events));
  }

private:
  void assign(Operation *op) {
    if (!isInstruction(op))
      return;
    ++position;
    if (isAsynchronous(op))
      return fork(op);
    if (auto wait = dyn_cast<WaitOp>(op))
      waits[op] = {eventOf.lookup(wait.getFuture().getDefiningOp())};
    setLastCompute(op);
  }

  SmallVector<Microbatch> getMicrobatchesOf(Operation *op) {
    Value condition = getCondition(op);
    if (!loop || (!condition && op->getParentOp() == loop))
      return {First, Middle, Last};
    return {condition && condition == loop.getFirst() ? First : Last};
  }

  void setLastCompute(Operation *op) {
    for (Microbatch microbatch : getMicrobatchesOf(op))
      lastCompute[microbatch] = {op, position};
  }

  /// A collective with a future begins where it stands in the compute stream,
  /// after the copies that it takes: in each microbatch in which it runs, after
  /// the last instruction before it that runs there, too.
  void fork(Operation *op) {
    SmallVector<Microbatch> microbatches = getMicrobatchesOf(op);
    bool isInLoop = loop && op->getParentOp() == loop;
    if (isInLoop && llvm::any_of(microbatches, [&](Microbatch microbatch) {
          return !lastCompute[microbatch].op;
        })) {
      OpBuilder builder(op);
      setLastCompute(createFor<MarkOp>(op, builder));
      ++position;
    }
    plan::Stream stream = getStream(op);
    auto name = StringAttr::get(op->getContext(), plan::streamName(stream));
    op->setDiscardableAttr(streamAttrName, name);
    SmallVector<int32_t> events;
    for (Microbatch microbatch : microbatches) {
      auto [compute, at] = lastCompute[microbatch];
      int64_t &waited = forked[size_t(stream)][microbatch];
      if (!compute || at <= waited)
        continue;
      waited = at;
      int32_t event = record(compute);
      if (!llvm::is_contained(events, event))
        events.push_back(event);
    }
    for (Value operand : op->getOperands())
      if (auto it = eventOf.find(operand.getDefiningOp());
          it != eventOf.end() && !llvm::is_contained(events, it->second))
        events.push_back(it->second);
    if (!events.empty())
      waits[op] = events;
    record(op);
  }

  /// The event that the op records.
  int32_t record(Operation *op) {
    auto [it, isNew] = recorded.try_emplace(op, numEvents);
    if (isNew) {
      ++numEvents;
      op->setDiscardableAttr(
          recordsAttrName,
          IntegerAttr::get(IntegerType::get(op->getContext(), 32), it->second));
      if (isAsynchronous(op))
        eventOf[op] = it->second;
    }
    return it->second;
  }

  MicrobatchesOp loop;
  int32_t numEvents = 0;
  llvm::MapVector<Operation *, SmallVector<int32_t>> waits;
  llvm::DenseMap<Operation *, int32_t> recorded;
  /// Those of collectives and copies beside computation.
  llvm::DenseMap<Operation *, int32_t> eventOf;
  struct Place {
    Operation *op = nullptr;
    int64_t at = 0;
  };
  /// The last instruction of the compute stream, and for each stream the
  /// position up to which it has waited for it.
  std::array<Place, kNumMicrobatches> lastCompute;
  int64_t position = 0;
  std::array<std::array<int64_t, kNumMicrobatches>, plan::kNumStreams> forked =
      {};
};

struct AssignStreams : mlir::fsdp::impl::AssignStreamsBase<AssignStreams> {
  void runOnModule() override {
    for (auto program : getOperation().getOps<ProgramOp>())
      assignStreams(program);
  }
};
} // namespace

void mlir::fsdp::assignStreams(ProgramOp program) {
  StreamAssigner().run(program);
}

void mlir::fsdp::clearStreams(ProgramOp program) {
  program.walk([](Operation *op) {
    for (StringRef name : {streamAttrName, waitsAttrName, recordsAttrName})
      op->removeDiscardableAttr(name);
    if (isa<MarkOp>(op))
      op->erase();
  });
}
