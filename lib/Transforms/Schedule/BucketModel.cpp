//===- BucketModel.cpp - the numbers of a step that buckets depend on -----===//
#include "BucketModel.h"

#include "fsdp/Plan/Operands.h"
#include "fsdp/Simulate/Collectives.h"

#include <limits>
#include <utility>

using mlir::fsdp::BucketItem;
using mlir::fsdp::BucketProblem;
using mlir::fsdp::CompiledStep;
using mlir::fsdp::LinkTime;
using namespace ::fsdp::plan;
namespace simulate = ::fsdp::simulate;

namespace {
/// Positions, both included; empty at first.
struct Window {
  int64_t first = std::numeric_limits<int64_t>::max();
  int64_t last = -1;
  void add(int64_t position) {
    first = std::min(first, position);
    last = std::max(last, position);
  }
};

class Modeller {
public:
  Modeller(const CompiledStep &step, const simulate::DeviceModel &device,
           const llvm::StringMap<int32_t> &itemOf,
           llvm::ArrayRef<int32_t> kinds)
      : step(step), device(device), plan(step.plan),
        memory(replayMemory(plan, device.memoryModel())),
        others(memory.liveBytes()), forward(kinds.size()),
        backward(kinds.size()), isResharded(kinds.size()) {
    for (int32_t kind : kinds) {
      BucketItem &item = problem.items.emplace_back();
      item.kind = kind;
      item.inForward = item.inBackward = false;
    }
    for (const Unit &unit : plan.units)
      items.push_back(
          unit.params.empty()
              ? -1
              : itemOf.lookup(plan.params[size_t(unit.params[0])].name));
  }

  BucketProblem run(int64_t reducesInFlight) {
    problem.reducesInFlight = int32_t(
        std::min<int64_t>(reducesInFlight, mlir::fsdp::kMostReducesInFlight));
    findTimes();
    findReshards();
    for (const simulate::CollectiveUse &use : simulate::findCollectives(plan)) {
      const Instruction &instruction =
          plan.instructions[size_t(use.instruction)];
      if (const auto *gather = std::get_if<AllGather>(&instruction.kind))
        addGather(*gather, use);
      else if (const auto *reduce =
                   std::get_if<ReduceScatter>(&instruction.kind))
        addReduce(*reduce, use.instruction, instruction.buffer);
    }
    findLinks();
    findOthers();
    return std::move(problem);
  }

private:
  void findTimes() {
    time.assign(plan.instructions.size() + 1, 0);
    for (size_t i = 0; i < plan.instructions.size(); ++i) {
      const Instruction &instruction = plan.instructions[i];
      Stream kind = simulate::timeKind(instruction);
      bool computes = kind == Stream::Compute || kind == Stream::ModelAxes;
      time[i + 1] =
          time[i] + (computes ? step.cost.instructions[i].seconds : 0);
      if (instruction.phase == Phase::Forward)
        problem.backwardBegin = time[i + 1];
      if (instruction.phase != Phase::Optimizer)
        problem.end = time[i + 1];
    }
  }

  /// Those after forward; what is gathered all the time counts with the rest.
  void findReshards() {
    for (size_t i = 0; i < plan.instructions.size(); ++i) {
      const auto *reshard = std::get_if<Reshard>(&plan.instructions[i].kind);
      int32_t index = reshard ? items[size_t(reshard->unit)] : -1;
      if (index < 0)
        continue;
      bool inForward = plan.instructions[i].phase == Phase::Forward;
      (inForward ? forward : backward)[size_t(index)].add(int64_t(i));
      if (inForward)
        isResharded[size_t(index)] = true;
    }
  }

  void addGather(const AllGather &gather, const simulate::CollectiveUse &use) {
    int32_t index = items[size_t(gather.unit)];
    if (index < 0)
      return;
    // One of backward may be launched in forward.
    auto needed = size_t(use.wait < 0 ? use.instruction : use.wait);
    bool inForward = plan.instructions[needed].phase == Phase::Forward;
    BucketItem &item = problem.items[size_t(index)];
    item.gatherBytes = 0;
    for (int32_t param : plan.units[size_t(gather.unit)].params)
      item.gatherBytes += paddedBytes(
          plan, param, plan.params[size_t(param)].computeSpec().dtype);
    if (inForward) {
      item.inForward = true;
      item.forwardUse = time[needed];
      item.forwardEnd = problem.backwardBegin;
      forward[size_t(index)].add(int64_t(needed));
    } else {
      item.inBackward = true;
      item.backwardUse = time[needed];
      backward[size_t(index)].add(int64_t(needed));
      group = gather.group;
    }
    if (!isResharded[size_t(index)])
      return;
    item.forwardEnd = time[size_t(forward[size_t(index)].last)];
    item.gathered = 0;
    for (ValueId value : gather.outs)
      item.gathered += takeOut(value, MemoryUse::GatheredParam);
  }

  void addReduce(const ReduceScatter &reduce, int32_t position,
                 ValueId buffer) {
    int32_t index = items[size_t(reduce.unit)];
    if (index < 0)
      return;
    BucketItem &item = problem.items[size_t(index)];
    item.reduceBegin = time[size_t(position)];
    backward[size_t(index)].add(position);
    for (size_t i = 0; i < reduce.params.size(); ++i) {
      item.reduceBytes +=
          paddedBytes(plan, reduce.params[i],
                      reduce.reduceDtype.value_or(
                          plan.values[size_t(reduce.ins[i])].dtype));
      item.gradient += takeOut(reduce.ins[i], MemoryUse::Gradient);
    }
    item.gradient += takeOut(buffer, MemoryUse::ReduceInput);
  }

  /// Counts a value's storage no longer with the rest; returns its bytes.
  int64_t takeOut(ValueId value, MemoryUse use) {
    int32_t index = value < 0 ? -1 : memory.storageOf[size_t(value)];
    if (index < 0)
      return 0;
    Storage &storage = memory.storages[size_t(index)];
    if (storage.use != use)
      return 0;
    for (const Life &life : storage.lives)
      for (int64_t position = life.first; position <= life.last; ++position)
        others[size_t(position)] -= storage.bytes;
    return std::exchange(storage.bytes, 0);
  }

  LinkTime linkTime(simulate::Collective what, simulate::Axis axis) const {
    auto seconds = [&](double bytes) {
      return simulate::transferTime(device, what, axis, bytes).seconds;
    };
    double latency = seconds(0);
    return {latency, (seconds(1e9) - latency) / 1e9};
  }

  void findLinks() {
    using simulate::Collective;
    simulate::Axis shards = simulate::shardAxis(plan);
    problem.gather = linkTime(Collective::AllGather, shards);
    problem.again = group > 0 ? linkTime(Collective::AllGather,
                                         simulate::shardAxis(plan, group))
                              : problem.gather;
    problem.slowdown = 1 - 1 / device.collectiveSlowdown;
    problem.reduce = linkTime(Collective::ReduceScatter, shards);
    if (plan.replicas > 1) {
      LinkTime all =
          linkTime(Collective::AllReduce, {plan.replicas, plan.shards()});
      problem.reduce.latency += all.latency;
      problem.reduce.perByte += all.perByte / double(plan.shards());
    }
  }

  void findOthers() {
    int64_t always = sum(staticBytes(plan, device.memoryModel()));
    auto most = [&](const Window &window) {
      int64_t bytes = 0;
      for (int64_t i = window.first; i <= window.last; ++i)
        bytes = std::max(bytes, others[size_t(i)]);
      return always + bytes;
    };
    for (size_t i = 0; i < problem.items.size(); ++i) {
      problem.items[i].forwardPeak = most(forward[i]);
      problem.items[i].backwardPeak = most(backward[i]);
    }
    problem.otherPeak = most({0, memory.positions - 1});
  }

  const CompiledStep &step;
  const simulate::DeviceModel &device;
  const Plan &plan;
  Memory memory;
  /// Bytes alive at each position that no bucket has.
  std::vector<int64_t> others;
  /// Per item: when it is used.
  std::vector<Window> forward, backward;
  std::vector<bool> isResharded;
  std::vector<int32_t> items; ///< per unit of the plan
  std::vector<double> time;   ///< of compute, before each instruction
  int64_t group = 0;          ///< AllGather::group of backward
  BucketProblem problem;
};
} // namespace

BucketProblem mlir::fsdp::modelBuckets(const CompiledStep &step,
                                       const simulate::DeviceModel &device,
                                       const llvm::StringMap<int32_t> &itemOf,
                                       llvm::ArrayRef<int32_t> kinds,
                                       int64_t reducesInFlight) {
  return Modeller(step, device, itemOf, kinds).run(reducesInFlight);
}
