//===- ShmAllReduce.cpp - all-reduce of small vectors ---------------------===//
//
// Replicas hold the same shards, so each combines the vectors of its own ranks.
// Every rank writes its vector, waits for all others', and combines them.
// Two places per rank suffice: a rank that has everybody's k-th vector knows
// that everybody has read the vectors before it.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Runtime/Collectives/Reduce.h"
#include "fsdp/Runtime/Collectives/ShmComm.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Memory/Layout.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>

#include <cstring>

namespace fsdp::runtime {

void ShmComm::allReduce(const at::Tensor &vector, Reduction reduction) {
  if (plan.shards() == 1)
    return;
  if (!vector.is_contiguous() || vector.nbytes() > segment.layout().vectorBytes)
    throw RunError("expected a contiguous vector of at most " +
                   std::to_string(segment.layout().vectorBytes) +
                   " bytes to all-reduce, got " +
                   std::to_string(vector.nbytes()));
  uint32_t slot = allReduces++ % 2;
  std::memcpy(segment.vector(ownRank, slot), vector.const_data_ptr(),
              vector.nbytes());
  own().vectorsReady.publish(allReduces);
  waitAll(shardGroup, &RankState::vectorsReady, allReduces, {"all_reduce"});
  if (reduction == Reduction::Sum) {
    std::vector<const std::byte *> in;
    for (int64_t r : shardGroup)
      in.push_back(segment.vector(r, slot));
    plan::DType dtype = planType(vector.scalar_type());
    return reduceAroundRing({.in = dtype, .reduce = dtype, .out = dtype},
                            vector.mutable_data_ptr(), in, vector.numel(), 0,
                            vector.numel());
  }
  for (int64_t r : shardGroup) {
    at::Tensor term = at::from_blob(segment.vector(r, slot), vector.sizes(),
                                    vector.scalar_type());
    if (r == shardGroup.front())
      vector.copy_(term);
    else
      vector.copy_(at::maximum(vector, term));
  }
}

} // namespace fsdp::runtime
