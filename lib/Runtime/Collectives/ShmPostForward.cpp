//===- ShmPostForward.cpp - parameters kept in groups after forward -------===//
//
// A group has one place for a unit's parameters, whole; each of its ranks
// copies its part there. The place is written once a version of the parameters:
// a rank has a new version only when nobody reads the old one (beginUpdate).
//
//===----------------------------------------------------------------------===//
#include "fsdp/Runtime/Collectives/ShmComm.h"

#include <ATen/ops/from_blob.h>

#include <cstring>

namespace fsdp::runtime {

void ShmComm::keepPart(int32_t unit, int64_t groupSize) {
  KeptPart &part = keptParts[unit];
  if (part.version == versions)
    return;
  int64_t share = plan.shards() / groupSize;
  int64_t first = shardIndex() % groupSize * share;
  for (int32_t param : plan.units[unit].params) {
    const at::Tensor &full = fullParams[param];
    int64_t rows = full.size(0);
    int64_t begin = plan::shardRows(rows, plan.shards(), first).begin;
    int64_t end = plan::shardRows(rows, plan.shards(), first + share - 1).end;
    if (end == begin || full.numel() == 0)
      continue;
    size_t rowBytes = full.nbytes() / size_t(rows);
    std::memcpy(segment.kept(ownRank, param) + size_t(begin) * rowBytes,
                static_cast<const std::byte *>(full.const_data_ptr()) +
                    size_t(begin) * rowBytes,
                size_t(end - begin) * rowBytes);
  }
  part = {++partsKept, versions};
  own().partsKept.publish(partsKept);
}

Collective ShmComm::gatherParts(int32_t unit, int64_t groupSize) {
  Collective gather;
  for (int32_t param : plan.units[unit].params)
    gather.results.push_back(at::from_blob(segment.kept(ownRank, param),
                                           fullParams[param].sizes(),
                                           fullParams[param].scalar_type()));
  gather.wait = [this, unit, groupSize, number = keptParts[unit].number] {
    std::vector<int64_t> group;
    for (int64_t rank : shardGroup)
      if (rank / groupSize == ownRank / groupSize)
        group.push_back(rank);
    waitAll(group, &RankState::partsKept, number, {"all_gather", unit});
  };
  return gather;
}

} // namespace fsdp::runtime
