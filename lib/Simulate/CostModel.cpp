//===- CostModel.cpp - seconds of each instruction of a plan --------------===//
#include "fsdp/Simulate/CostModel.h"

#include "Fusion.h"
#include "fsdp/Plan/ModelCollectives.h"
#include "fsdp/Plan/Operands.h"

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

namespace fsdp::simulate {

using namespace plan;

namespace {

double valueBytes(const Plan &plan, const std::vector<ValueId> &ids) {
  double bytes = 0;
  for (ValueId id : ids)
    if (id != -1)
      bytes += double(plan.values[id].numBytes());
  return bytes;
}

/// Reads and writes of a parameter's elements by the optimizer, its gradient
/// included: fused kernels read param, grad and states and write param and
/// states; otherwise torch.optim's formula makes a pass for each operator.
double optimizerPasses(const Optimizer &optimizer) {
  if (optimizer.name == "sgd")
    return (optimizer.momentum != 0 ? 5 : 3) +
           (optimizer.fused || optimizer.weightDecay == 0 ? 0 : 3);
  if (optimizer.isPlugin())
    return 5; // one state, as Lion's
  if (optimizer.isExternal())
    return 0; // not known
  double passes = optimizer.fused ? 7 : 20;
  return passes + (optimizer.amsgrad ? (optimizer.fused ? 2 : 3) : 0);
}

class CostModel {
public:
  CostModel(const Plan &plan, const DeviceModel &device, int64_t rank)
      : plan(plan), device(device), shardIndex(plan.shardIndex(rank)) {}

  StepCost run(const Profile *profile) {
    size_t count = plan.instructions.size();
    result.instructions.resize(count);
    works.assign(count, OperatorWork{OperatorWork::Kind::Free});
    launches.assign(count, true);
    for (size_t i = 0; i < count; ++i) {
      const Instruction &instruction = plan.instructions[i];
      const auto *call = std::get_if<Call>(&instruction.kind);
      if (!call)
        continue;
      works[i] = workOf(plan, *call);
      if (call->reduceInputOf >= 0)
        inPlace.insert(call->reduceInputOf);
    }
    ModelWork model = modelWork(plan);
    result.modelFlops = model.flops;
    result.flopsDtype = model.dtype;
    if (device.fusePointwise)
      fuse(plan, works, launches);
    for (size_t i = 0; i < count; ++i)
      result.instructions[i] =
          std::visit([&](const auto &kind) { return cost(i, kind); },
                     plan.instructions[i].kind);
    if (device.collectiveCopies)
      addCopies();
    result.modelled =
        std::count_if(result.instructions.begin(), result.instructions.end(),
                      [](const Cost &cost) { return cost.seconds > 0; });
    if (profile)
      apply(*profile);
    return std::move(result);
  }

private:
  double memorySeconds(double bytes) const {
    return bytes / (device.memoryBandwidth * device.memoryFraction);
  }
  Cost kernel(double bytes) const {
    return {memorySeconds(bytes) + device.opOverhead};
  }
  Cost collective(Collective what, Axis axis, double bytes) const {
    Transfer transfer = transferTime(device, what, axis, bytes);
    return {transfer.seconds, transfer.medium};
  }
  double unitBytes(int32_t unit) const {
    double bytes = 0;
    for (int32_t param : plan.units[unit].params)
      bytes += paddedBytes(plan, param, plan.params[param].computeSpec().dtype);
    return bytes;
  }
  double shardBytes(int32_t param) const {
    return double(shardSpec(plan, param, shardIndex).numBytes());
  }

  /// A collective of the model.
  std::optional<Cost> modelCost(const Call &call) const {
    std::optional<ModelCollective> made = modelCollective(plan, call);
    const ModelAxis *axis =
        made && made->kind ? findAxis(plan.modelParallel, made->axis) : nullptr;
    if (!axis)
      return std::nullopt;
    Cost cost = collective(*made->kind, {axis->ranks, axis->stride},
                           double(passedBytes(plan, call)));
    // Only FSDP's collectives find the operands where their ranks keep them.
    if (device.sharedMemory)
      cost.seconds += memorySeconds(valueBytes(plan, getOperands(call)) +
                                    valueBytes(plan, call.outs));
    return cost;
  }

  Cost cost(size_t index, const Call &call) const {
    if (std::optional<Cost> made = modelCost(call))
      return *made;
    const OperatorWork &work = works[index];
    if (work.kind == OperatorWork::Kind::Free)
      return {};
    double fraction = work.kind == OperatorWork::Kind::Attention
                          ? device.attentionFraction
                          : device.matmulFraction;
    double arithmetic = work.flops / (device.peak(work.dtype) * fraction);
    return {std::max(arithmetic, memorySeconds(work.bytes)) +
            (launches[index] ? device.opOverhead : 0)};
  }
  Cost cost(size_t, const AllGather &gather) const {
    return collective(Collective::AllGather, shardAxis(plan, gather.group),
                      unitBytes(gather.unit));
  }
  Cost cost(size_t, const Reshard &reshard) const {
    if (reshard.keep == 0)
      return {};
    return kernel(2 * unitBytes(reshard.unit) / double(reshard.keep));
  }
  Cost cost(size_t, const ReduceScatter &reduce) const {
    double bytes = 0, copied = 0;
    for (size_t i = 0; i < reduce.params.size(); ++i) {
      int32_t param = reduce.params[i];
      const Value &in = plan.values[reduce.ins[i]];
      DType dtype = reduce.reduceDtype.value_or(in.dtype);
      bytes += paddedBytes(plan, param, dtype);
      if (dtype != in.dtype || !inPlace.count(param))
        copied += double(in.numBytes() + in.numElements() * byteWidth(dtype));
    }
    Cost cost = collective(Collective::ReduceScatter, shardAxis(plan), bytes);
    if (device.sharedMemory)
      cost.seconds += memorySeconds(copied);
    return cost;
  }
  Cost cost(size_t, const AllReduce &reduce) const {
    return collective(Collective::AllReduce, replicateAxis(plan),
                      valueBytes(plan, reduce.ins));
  }
  Cost cost(size_t, const Accumulate &sum) const {
    return kernel(3 * valueBytes(plan, sum.outs));
  }
  Cost hostCopy(double bytes) const {
    if (device.hostLink.bandwidth == 0)
      return kernel(2 * bytes); // the host's memory is the device's
    return {device.hostLink.latency + bytes / device.hostLink.bandwidth,
            Medium::HostLink};
  }
  Cost cost(size_t, const CopyToDevice &copy) const {
    double bytes = 0;
    for (int32_t param : plan.units[copy.unit].params)
      bytes += shardBytes(param) /
               double(byteWidth(plan.params[param].spec.dtype)) *
               double(byteWidth(plan.params[param].computeSpec().dtype));
    return hostCopy(bytes);
  }
  Cost cost(size_t, const CopyToHost &copy) const {
    return hostCopy(valueBytes(plan, copy.ins));
  }
  Cost cost(size_t, const OffloadActivation &offload) const {
    return hostCopy(valueBytes(plan, {offload.out}));
  }
  Cost cost(size_t, const ReloadActivation &reload) const {
    return hostCopy(valueBytes(plan, {reload.host}));
  }
  /// A scalar over the ranks of a replica.
  double scalarSeconds() const {
    return transferTime(device, Collective::AllReduce, shardAxis(plan), 4)
        .seconds;
  }
  Cost cost(size_t, const Unscale &unscale) const {
    double bytes = gradBytes(unscale.params);
    return {memorySeconds((unscale.deferred ? 1 : 2) * bytes) +
            device.opOverhead + scalarSeconds()};
  }
  Cost cost(size_t, const ClipGradNorm &clip) const {
    return {memorySeconds(3 * gradBytes(clip.params)) + device.opOverhead +
            scalarSeconds()};
  }
  double gradBytes(const std::vector<int32_t> &params) const {
    double bytes = 0;
    for (int32_t param : params)
      bytes += shardBytes(param);
    return bytes;
  }
  Cost cost(size_t, const OptimizerStep &step) const {
    double bytes = 0;
    for (size_t i = 0; i < step.params.size(); ++i) {
      int32_t group = step.groups.empty() ? 0 : step.groups[i];
      const Optimizer &optimizer =
          group == 0 ? plan.optimizer : plan.paramGroups[group - 1];
      const Param &param = plan.params[step.params[i]];
      double shard = shardBytes(step.params[i]);
      bytes += shard * optimizerPasses(optimizer);
      // The copy in the dtype that is gathered.
      if (param.computeSpec().dtype != param.spec.dtype)
        bytes += shard + shard / double(byteWidth(param.spec.dtype)) *
                             double(byteWidth(param.computeSpec().dtype));
    }
    return kernel(bytes);
  }
  /// What reads values moves their bytes; what binds values or waits is free.
  template <typename KindT> Cost cost(size_t index, const KindT &) const {
    const Instruction &instruction = plan.instructions[index];
    std::vector<ValueId> operands = getOperands(instruction);
    if (operands.empty())
      return {};
    return kernel(valueBytes(plan, operands) +
                  valueBytes(plan, getResults(instruction)));
  }

  /// FSDP2's copies run on the compute stream: out of the gathered buffer
  /// before its first use, and of the gradients before they are reduced. A
  /// collective on the compute stream takes its own.
  void addCopies() {
    std::vector<int> recorder;
    for (size_t i = 0; i < plan.instructions.size(); ++i) {
      const Instruction &instruction = plan.instructions[i];
      if (instruction.records < 0)
        continue;
      recorder.resize(
          std::max<size_t>(recorder.size(), instruction.records + 1), -1);
      recorder[instruction.records] = int(i);
    }
    std::map<EventId, double> copyOut;
    for (size_t i = 0; i < plan.instructions.size(); ++i) {
      const Instruction &instruction = plan.instructions[i];
      if (instruction.stream == Stream::Compute)
        for (EventId event : instruction.waits)
          if (auto found = copyOut.find(event); found != copyOut.end()) {
            result.instructions[i].seconds += found->second;
            copyOut.erase(found);
          }
      if (const auto *gather = std::get_if<AllGather>(&instruction.kind)) {
        double seconds = kernel(2 * unitBytes(gather->unit)).seconds;
        if (instruction.stream == Stream::Compute || instruction.records < 0)
          result.instructions[i].seconds += seconds;
        else
          copyOut[instruction.records] = seconds;
      } else if (const auto *reduce =
                     std::get_if<ReduceScatter>(&instruction.kind)) {
        double bytes = valueBytes(plan, reduce->ins);
        for (size_t k = 0; k < reduce->ins.size(); ++k) {
          const Value &in = plan.values[reduce->ins[k]];
          bytes += double(in.numElements() *
                          byteWidth(reduce->reduceDtype.value_or(in.dtype)));
        }
        int before = int(i);
        if (instruction.stream != Stream::Compute)
          for (EventId event : instruction.waits)
            if (event < EventId(recorder.size()) && recorder[event] >= 0 &&
                plan.instructions[recorder[event]].stream == Stream::Compute)
              before = before == int(i) ? recorder[event]
                                        : std::max(before, recorder[event]);
        result.instructions[before].seconds += kernel(bytes).seconds;
      }
    }
  }

  void apply(const Profile &profile) {
    std::vector<std::string> what;
    for (const Instruction &instruction : plan.instructions)
      what.push_back(signature(plan, instruction));
    result.samePlan = profile.instructions.size() == what.size() &&
                      profile.worldSize == plan.worldSize;
    for (size_t i = 0; result.samePlan && i < what.size(); ++i)
      result.samePlan = profile.instructions[i].what == what[i];
    result.outsideSeconds = profile.outsideSeconds;
    struct Mean {
      double sum = 0;
      int64_t count = 0;
    };
    std::unordered_map<std::string, Mean> means;
    if (!result.samePlan)
      for (const Profile::Entry &entry : profile.instructions) {
        Mean &mean = means[entry.what];
        mean.sum += entry.seconds;
        ++mean.count;
      }
    result.modelled = 0;
    for (size_t i = 0; i < what.size(); ++i) {
      Cost &cost = result.instructions[i];
      if (result.samePlan) {
        cost.seconds = profile.instructions[i].seconds;
        ++result.measured;
      } else if (auto found = means.find(what[i]); found != means.end()) {
        cost.seconds = found->second.sum / double(found->second.count);
        ++result.measured;
      } else if (cost.seconds > 0) {
        ++result.modelled;
      }
    }
  }

  const Plan &plan;
  const DeviceModel &device;
  int64_t shardIndex;
  std::vector<OperatorWork> works;
  std::vector<bool> launches;
  /// Parameters whose gradient is written where the reduction reads it.
  std::set<int32_t> inPlace;
  StepCost result;
};

} // namespace

StepCost costOf(const Plan &plan, const DeviceModel &device,
                const Profile *profile, int64_t rank) {
  return CostModel(plan, device, rank).run(profile);
}

double modelFlopsUtilization(const StepCost &cost, const DeviceModel &device,
                             double stepSeconds) {
  if (stepSeconds <= 0)
    return 0;
  return cost.modelFlops / (stepSeconds * device.peak(cost.flopsDtype));
}

int64_t tokensPerStep(const Plan &plan) {
  int64_t tokens = plan.inputs.empty() || plan.inputs[0].spec.shape.empty()
                       ? 0
                       : plan.inputs[0].spec.shape[0];
  for (const Input &input : plan.inputs)
    if (isInteger(input.spec.dtype) && input.spec.shape.size() == 2) {
      tokens = input.spec.numElements();
      break;
    }
  return tokens * plan.accumulationSteps * plan.worldSize;
}

} // namespace fsdp::simulate
