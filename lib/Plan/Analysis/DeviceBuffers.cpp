//===- DeviceBuffers.cpp - memory of collectives beside their results -----===//
#include "fsdp/Plan/DeviceBuffers.h"
#include "StreamClock.h"
#include "fsdp/Plan/Memory.h"

#include <algorithm>
#include <map>
#include <utility>

namespace fsdp::plan {

namespace {

int64_t numRows(const Param &param) {
  return param.spec.shape.empty() ? 1 : param.spec.shape[0];
}

int64_t rowElements(const Param &param) {
  int64_t rows = numRows(param);
  return rows == 0 ? 0 : param.spec.numElements() / rows;
}

TensorSpec bytesSpec(const std::vector<int64_t> &parts) {
  return {{parts.back()}, DType::UInt8};
}

/// Begins of parts one behind the other, each where tensors may begin.
template <typename BytesOf>
std::vector<int64_t> layOut(const std::vector<int32_t> &params,
                            BytesOf bytesOf) {
  std::vector<int64_t> begins = {0};
  for (int32_t param : params)
    begins.push_back(begins.back() + alignTo(bytesOf(param)));
  return begins;
}

struct BufferSpec {
  const Plan &plan;

  int64_t rowOf(const std::vector<int32_t> &params) const {
    int64_t elements = 0;
    for (int32_t param : params)
      elements += chunkElements(plan, param);
    return elements;
  }

  std::optional<TensorSpec> operator()(const ReduceScatter &reduce) const {
    if (plan.shards() == 1 || reduce.params.empty())
      return std::nullopt;
    return TensorSpec{{plan.shards() * rowOf(reduce.params)},
                      reduce.reduceDtype.value_or(
                          plan.values[size_t(reduce.ins.front())].dtype)};
  }
  std::optional<TensorSpec> operator()(const AllReduce &reduce) const {
    if (plan.replicas == 1 || reduce.params.empty())
      return std::nullopt;
    return TensorSpec{{rowOf(reduce.params)},
                      plan.values[size_t(reduce.ins.front())].dtype};
  }
  std::optional<TensorSpec> operator()(const CopyToDevice &copy) const {
    return bytesSpec(copiedParts(plan, copy.unit));
  }
  std::optional<TensorSpec> operator()(const Reshard &reshard) const {
    if (reshard.keep == 0)
      return std::nullopt;
    return bytesSpec(keptParts(plan, reshard.unit, reshard.keep));
  }
  std::optional<TensorSpec> operator()(const auto &) const {
    return std::nullopt;
  }
};

/// Adds the buffers of one list of instructions.
class BufferAdder {
public:
  BufferAdder(Plan &plan, std::vector<Instruction> &instructions)
      : plan(plan), instructions(instructions) {}

  void run() {
    for (size_t i = 0; i < instructions.size(); ++i) {
      Instruction &instruction = instructions[i];
      add(instruction, int64_t(i));
      Clock now = clocks[size_t(instruction.stream)];
      for (EventId event : instruction.waits)
        if (auto it = recorded.find(event); it != recorded.end())
          join(now, it->second);
      now[size_t(instruction.stream)] = int64_t(i) + 1;
      clocks[size_t(instruction.stream)] = now;
      if (instruction.records != -1)
        recorded[instruction.records] = now;
      if (instruction.stream == Stream::Compute)
        free(instruction, now);
    }
  }

private:
  /// A buffer, and the position of what uses it last.
  struct Open {
    ValueId buffer;
    int64_t last;
    Stream stream;
  };

  void add(Instruction &instruction, int64_t position) {
    if (auto *gather = std::get_if<AllGather>(&instruction.kind)) {
      auto it = sources.find(gather->unit);
      if (it == sources.end())
        return;
      gather->source = it->second;
      sources.erase(it);
      open.push_back({gather->source, position, instruction.stream});
      return;
    }
    std::optional<TensorSpec> spec = bufferSpec(plan, instruction);
    if (!spec)
      return;
    instruction.buffer = ValueId(plan.values.size());
    plan.values.emplace_back(std::move(*spec));
    // Those of a unit are used until it is gathered.
    if (const auto *copy = std::get_if<CopyToDevice>(&instruction.kind))
      sources[copy->unit] = instruction.buffer;
    else if (const auto *reshard = std::get_if<Reshard>(&instruction.kind))
      sources[reshard->unit] = instruction.buffer;
    else
      open.push_back({instruction.buffer, position, instruction.stream});
  }

  void free(Instruction &instruction, const Clock &now) {
    std::erase_if(open, [&](const Open &candidate) {
      if (candidate.last >= now[size_t(candidate.stream)])
        return false;
      instruction.frees.push_back(candidate.buffer);
      return true;
    });
  }

  Plan &plan;
  std::vector<Instruction> &instructions;
  std::array<Clock, kNumStreams> clocks = {};
  std::map<EventId, Clock> recorded;
  std::map<int32_t, ValueId> sources; ///< by unit
  std::vector<Open> open;
};

} // namespace

int64_t chunkElements(const Plan &plan, int32_t index) {
  return shardSpec(plan, index, 0).numElements();
}

std::vector<int64_t> copiedParts(const Plan &plan, int32_t unit) {
  return layOut(plan.units[size_t(unit)].params, [&](int32_t param) {
    TensorSpec shard = shardSpec(plan, param, 0);
    shard.dtype = plan.params[size_t(param)].computeSpec().dtype;
    return shard.numBytes();
  });
}

std::vector<int64_t> keptBegins(const Plan &plan, int32_t index, int64_t keep) {
  const Param &param = plan.params[size_t(index)];
  int64_t shards = plan.shards();
  std::vector<int64_t> begins;
  for (int64_t i = 0; i < keep; ++i)
    begins.push_back(
        shardRows(numRows(param), shards, i * (shards / keep)).begin *
        rowElements(param));
  begins.push_back(param.spec.numElements());
  return begins;
}

std::vector<int64_t> keptParts(const Plan &plan, int32_t unit, int64_t keep) {
  return layOut(plan.units[size_t(unit)].params, [&](int32_t param) {
    return keptBegins(plan, param, keep)[1] *
           byteWidth(plan.params[size_t(param)].computeSpec().dtype);
  });
}

std::optional<TensorSpec> bufferSpec(const Plan &plan,
                                     const Instruction &instruction) {
  return std::visit(BufferSpec{plan}, instruction.kind);
}

bool hasDeviceBuffers(const Plan &plan) {
  for (const auto *list : {&plan.instructions, &plan.evaluation})
    for (const Instruction &instruction : *list)
      if (instruction.buffer != -1)
        return true;
  return false;
}

void addDeviceBuffers(Plan &plan) {
  if (hasDeviceBuffers(plan))
    return;
  for (auto *list : {&plan.instructions, &plan.evaluation})
    BufferAdder(plan, *list).run();
}

} // namespace fsdp::plan
