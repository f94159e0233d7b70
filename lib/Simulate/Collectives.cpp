//===- Collectives.cpp - where a plan's collectives stand -----------------===//
#include "fsdp/Simulate/Collectives.h"

#include "fsdp/Plan/ModelCollectives.h"
#include "fsdp/Plan/Operands.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>

namespace fsdp::simulate {

using namespace plan;

namespace {

/// The bytes of the other ranks, if n ranks have equal parts.
int64_t fromOthers(double bytes, int64_t ranks) {
  return int64_t(bytes / double(ranks) * double(ranks - 1));
}

struct BytesOf {
  const Plan &plan;

  double sum(const std::vector<ValueId> &ids) const {
    return std::accumulate(
        ids.begin(), ids.end(), 0.0, [&](double bytes, ValueId id) {
          return bytes + double(plan.values[size_t(id)].numBytes());
        });
  }
  int64_t operator()(const AllGather &gather) const {
    double bytes = 0;
    for (int32_t param : plan.units[size_t(gather.unit)].params)
      bytes += paddedBytes(plan, param,
                           plan.params[size_t(param)].computeSpec().dtype);
    return fromOthers(bytes, gather.group > 0 ? gather.group : plan.shards());
  }
  int64_t operator()(const ReduceScatter &reduce) const {
    double bytes = 0;
    for (size_t i = 0; i < reduce.params.size(); ++i)
      bytes += paddedBytes(plan, reduce.params[i],
                           reduce.reduceDtype.value_or(
                               plan.values[size_t(reduce.ins[i])].dtype));
    return fromOthers(bytes, plan.shards());
  }
  int64_t operator()(const AllReduce &reduce) const {
    return fromOthers(2 * sum(reduce.ins), plan.replicas);
  }
  int64_t operator()(const Call &call) const {
    std::optional<ModelCollective> made = modelCollective(plan, call);
    const ModelAxis *axis =
        made && made->kind ? findAxis(plan.modelParallel, made->axis) : nullptr;
    if (!axis)
      return 0;
    bool twice = made->kind == CollectiveKind::AllReduce;
    return fromOthers(double(passedBytes(plan, call)) * (twice ? 2 : 1),
                      axis->ranks);
  }
  int64_t operator()(const CopyToDevice &copy) const {
    int64_t bytes = 0;
    for (int32_t param : plan.units[size_t(copy.unit)].params) {
      TensorSpec shard = shardSpec(plan, param, 0);
      shard.dtype = plan.params[size_t(param)].computeSpec().dtype;
      bytes += shard.numBytes();
    }
    return bytes;
  }
  int64_t operator()(const CopyToHost &copy) const {
    return int64_t(sum(copy.ins));
  }
  int64_t operator()(const OffloadActivation &offload) const {
    return plan.values[size_t(offload.out)].numBytes();
  }
  int64_t operator()(const ReloadActivation &reload) const {
    return plan.values[size_t(reload.host)].numBytes();
  }
  template <typename Kind> int64_t operator()(const Kind &) const { return 0; }
};

} // namespace

std::vector<CollectiveUse> findCollectives(const Plan &plan) {
  std::vector<CollectiveUse> result;
  std::map<EventId, size_t> recorders;
  std::vector<int32_t> makers(plan.values.size(), -1);
  std::vector<int32_t> calls; // up to each position
  int32_t seen = 0;
  for (size_t i = 0; i < plan.instructions.size(); ++i) {
    const Instruction &instruction = plan.instructions[i];
    calls.push_back(seen);
    seen += std::holds_alternative<Call>(instruction.kind);
    for (ValueId value : getOperands(instruction))
      if (int32_t maker = makers[size_t(value)]; maker != -1)
        if (CollectiveUse &made = result[size_t(maker)]; made.use == -1) {
          made.use = int32_t(i);
          made.callsToUse = calls[i] - calls[size_t(made.instruction)];
        }
    if (instruction.stream == Stream::Compute)
      for (EventId event : instruction.waits)
        if (auto it = recorders.find(event); it != recorders.end())
          if (CollectiveUse &ended = result[it->second]; ended.wait == -1) {
            ended.wait = int32_t(i);
            ended.callsToWait = calls[i] - calls[size_t(ended.instruction)];
          }
    if (timeKind(instruction) == Stream::Compute)
      continue;
    CollectiveUse use;
    use.instruction = int32_t(i);
    use.kind = timeKind(instruction);
    use.unit = unitOfInstruction(plan, instruction);
    use.bytes = std::visit(BytesOf{plan}, instruction.kind);
    use.times = runsPerStep(plan, instruction);
    if (instruction.stream == Stream::Compute)
      use.wait = int32_t(i);
    else
      recorders[instruction.records] = result.size();
    for (ValueId value : getResults(instruction))
      makers[size_t(value)] = int32_t(result.size());
    result.push_back(use);
  }
  return result;
}

std::vector<CollectiveTime>
timeCollectives(const Plan &plan, const std::vector<CollectiveUse> &uses,
                const Timeline &timeline, const DeviceModel &device) {
  const std::vector<Span> &spans = timeline.spans;
  std::vector<int32_t> useOf(plan.instructions.size(), -1);
  for (size_t i = 0; i < uses.size(); ++i)
    useOf[size_t(uses[i].instruction)] = int32_t(i);
  std::vector<CollectiveTime> result;
  std::vector<int32_t> timeOf(spans.size(), -1);
  std::map<EventId, int32_t> recorders;
  std::array<int32_t, kNumStreams> last;
  last.fill(-1);
  // Per first use: the collectives that are read there next.
  std::map<int32_t, std::vector<size_t>> awaitingUse;
  auto endOf = [&](int32_t span) {
    return span < 0 ? 0 : spans[size_t(span)].end;
  };

  for (int32_t s = 0; s < int32_t(spans.size()); ++s) {
    const Span &span = spans[size_t(s)];
    const Instruction &instruction =
        plan.instructions[size_t(span.instruction)];
    size_t queue = device.serialStreams ? 0 : size_t(instruction.stream);
    int32_t latest = -1;
    for (EventId event : instruction.waits)
      if (auto it = recorders.find(event);
          it != recorders.end() &&
          spans[size_t(it->second)].microbatch == span.microbatch &&
          (latest < 0 || endOf(it->second) > endOf(latest)))
        latest = it->second;
    if (auto it = awaitingUse.find(span.instruction); it != awaitingUse.end()) {
      for (size_t reader : it->second)
        result[reader].use = span.begin;
      it->second.clear();
    }
    // As Timeline::exposed counts it.
    if (queue == 0 && span.begin > endOf(last[0]) && latest >= 0 &&
        timeOf[size_t(latest)] >= 0)
      result[size_t(timeOf[size_t(latest)])].exposed +=
          span.begin - endOf(last[0]);
    if (int32_t use = useOf[size_t(span.instruction)]; use >= 0) {
      CollectiveTime time;
      time.span = s;
      time.queued = last[queue] >= 0 && endOf(last[queue]) >= endOf(latest);
      time.cause = time.queued ? last[queue] : latest;
      if (queue == 0)
        time.exposed = span.end - span.begin;
      timeOf[size_t(s)] = int32_t(result.size());
      if (int32_t first = uses[size_t(use)].use; first >= 0)
        awaitingUse[first].push_back(result.size());
      result.push_back(time);
    }
    if (instruction.records != -1)
      recorders[instruction.records] = s;
    last[queue] = s;
  }
  auto end = std::max_element(
      spans.begin(), spans.end(),
      [](const Span &a, const Span &b) { return a.end < b.end; });
  if (end != spans.end() && end->end > endOf(last[0]))
    if (int32_t time = timeOf[size_t(end - spans.begin())]; time >= 0)
      result[size_t(time)].exposed += end->end - endOf(last[0]);
  return result;
}

} // namespace fsdp::simulate
