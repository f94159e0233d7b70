//===- SegmentLayout.cpp - what the ranks of one host share ---------------===//
#include "fsdp/Plan/SegmentLayout.h"

#include <algorithm>
#include <set>

namespace fsdp::plan {

namespace {

constexpr size_t kPage = 4096;

} // namespace

SegmentLayout::SegmentLayout(const Plan &plan, size_t headerBytes)
    : worldSize(plan.worldSize), params(plan.params.size()),
      masters(plan.params.size()), grads(plan.params.size()),
      shardGrads(plan.params.size()), reducedInPlace(plan.params.size()),
      reductionOf(plan.params.size(), -1), dedicated(plan.params.size()),
      kept(plan.params.size()) {
  paramsBegin = alignTo(headerBytes, kPage);
  replicaBytes = placeParams(plan);
  size_t end =
      placeKept(plan, paramsBegin + size_t(plan.replicas) * replicaBytes);
  end = placeVectors(plan, end);
  areasBegin = alignTo(end, kPage);

  Reductions reductions;
  for (const Instruction &instruction : plan.instructions)
    if (const auto *reduce = std::get_if<ReduceScatter>(&instruction.kind)) {
      for (int32_t param : reduce->params)
        reductionOf[param] = int32_t(reductions.size());
      reductions.push_back(reduce);
    }
  reductionsPerStep = int32_t(reductions.size());
  if (plan.shards() > 1) {
    findDedicated(plan);
    placeGrads(plan, reductions);
  }
  placeShardGrads(plan, reductions);
  areaBytes = alignTo(areaBytes, kPage);
  totalBytes = areasBegin + size_t(worldSize) * areaBytes;
}

size_t SegmentLayout::placeParams(const Plan &plan) {
  size_t end = 0;
  for (const Unit &unit : plan.units) {
    end = alignTo(end, kPage);
    for (int32_t param : unit.params) {
      end = alignTo(end);
      masters[param] = params[param] = end;
      // As FSDP2 gathers it: each rank may read as many rows as rank 0 has.
      end += size_t(paddedBytes(plan, param, plan.params[param].spec.dtype));
      if (!plan.params[param].computeDtype && !unit.cpuOffload)
        continue;
      end = alignTo(end);
      params[param] = end;
      end += size_t(plan.params[param].computeSpec().numBytes());
    }
  }
  return alignTo(end, kPage);
}

size_t SegmentLayout::placeVectors(const Plan &plan, size_t end) {
  bool reducesVectors = std::any_of(
      plan.instructions.begin(), plan.instructions.end(), [](const auto &i) {
        return std::holds_alternative<ClipGradNorm>(i.kind) ||
               std::holds_alternative<Unscale>(i.kind);
      });
  if (!reducesVectors || worldSize == 1)
    return end;
  vectorsBegin = alignTo(end);
  vectorBytes = alignTo(plan.params.size() * sizeof(double));
  return vectorsBegin + 2 * size_t(worldSize) * vectorBytes;
}

void SegmentLayout::findDedicated(const Plan &plan) {
  int32_t issued = 0;
  for (const Instruction &instruction : plan.instructions) {
    if (std::holds_alternative<ReduceScatter>(instruction.kind))
      ++issued;
    const auto *call = std::get_if<Call>(&instruction.kind);
    if (call && call->reduceInputOf >= 0)
      dedicated[call->reduceInputOf] =
          reductionOf[call->reduceInputOf] > issued + 1;
  }
}

void SegmentLayout::placeGrads(const Plan &plan, const Reductions &reductions) {
  std::vector<size_t> gradBytes(plan.params.size());
  for (const ReduceScatter *reduce : reductions)
    for (size_t i = 0; i < reduce->params.size(); ++i)
      gradBytes[reduce->params[i]] =
          size_t(plan.values[reduce->ins[i]].numBytes());
  std::vector<size_t> sizes;
  for (const ReduceScatter *reduce : reductions) {
    size_t size = 0;
    for (int32_t param : reduce->params) {
      if (dedicated[param])
        continue;
      grads[param] = size;
      size = alignTo(size + gradBytes[param]);
    }
    sizes.push_back(size);
  }
  size_t shared = 0;
  for (size_t j = 0; j < sizes.size(); ++j)
    shared = std::max(shared, sizes[j] + (j ? sizes[j - 1] : 0));
  areaBytes = shared;
  for (size_t j = 0; j < sizes.size(); ++j)
    for (int32_t param : reductions[j]->params) {
      if (dedicated[param]) {
        grads[param] = areaBytes;
        areaBytes = alignTo(areaBytes + gradBytes[param]);
      } else if (j % 2) {
        grads[param] += shared - sizes[j];
      }
    }
}

void SegmentLayout::placeShardGrads(const Plan &plan,
                                    const Reductions &reductions) {
  std::set<ValueId> reduced;
  for (const ReduceScatter *reduce : reductions)
    reduced.insert(reduce->outs.begin(), reduce->outs.end());
  for (const Instruction &instruction : plan.instructions)
    if (const auto *reduce = std::get_if<AllReduce>(&instruction.kind))
      for (size_t i = 0; i < reduce->params.size(); ++i) {
        int32_t param = reduce->params[i];
        reducedInPlace[param] = reduced.contains(reduce->ins[i]);
        shardGrads[param] = areaBytes;
        // Rank 0 has the largest shard.
        TensorSpec spec = shardSpec(plan, param, 0);
        spec.dtype = plan.values[reduce->ins[i]].dtype;
        areaBytes = alignTo(areaBytes + size_t(spec.numBytes()));
      }
}

size_t SegmentLayout::placeKept(const Plan &plan, size_t end) {
  for (const Instruction &instruction : plan.instructions) {
    const auto *reshard = std::get_if<Reshard>(&instruction.kind);
    if (!reshard || reshard->keep == 0)
      continue;
    for (int32_t param : plan.units[reshard->unit].params) {
      if (kept[param].group != 0)
        continue;
      end = alignTo(end);
      kept[param] = {
          reshard->keep, end,
          alignTo(size_t(plan.params[param].computeSpec().numBytes()))};
      end += size_t(worldSize / reshard->keep) * kept[param].stride;
    }
  }
  return end;
}

} // namespace fsdp::plan
