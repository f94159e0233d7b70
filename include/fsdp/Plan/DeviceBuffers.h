//===- DeviceBuffers.h - memory of collectives beside their results -------===//
//
// Ranks with memory of their own (MemoryModel::Device) need memory that no
// value of the captured program has: a reduction's flat tensor, the copies of
// offloaded shards, what a reshard keeps. Each such buffer is a value of the
// plan, so it has a life and a place in the arena, and the verifier checks it.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_PLAN_DEVICEBUFFERS_H
#define FSDP_PLAN_DEVICEBUFFERS_H

#include "fsdp/Plan/Plan.h"

#include <cstdint>
#include <optional>
#include <vector>

namespace fsdp::plan {

/// What Instruction::buffer is; nullopt for an instruction that needs none:
///
///   reduce_scatter over more than one rank: FSDP2's flat tensor in the dtype
///     of the reduction, for each rank a row of chunkElements of each gradient;
///   all_reduce over more than one replica: one such row;
///   copy_to_device: bytes, copiedParts;
///   reshard that keeps parts: bytes, keptParts.
std::optional<TensorSpec> bufferSpec(const Plan &plan,
                                     const Instruction &instruction);

/// Elements of a parameter's gradient in each row of a flat tensor: the rows of
/// rank 0, to which the other ranks' rows are padded.
int64_t chunkElements(const Plan &plan, int32_t param);

/// Where the parts of a unit's parameters begin in a buffer, in bytes, and
/// where the last one ends: rank 0's shards in their compute dtypes, or what
/// the first of a group of `keep` ranks keeps of them. Every rank's parts fit
/// there.
std::vector<int64_t> copiedParts(const Plan &plan, int32_t unit);
std::vector<int64_t> keptParts(const Plan &plan, int32_t unit, int64_t keep);

/// Per share of a group of `keep` neighbours: the number of elements of the
/// parameter that come before it; the last entry counts all elements.
std::vector<int64_t> keptBegins(const Plan &plan, int32_t param, int64_t keep);

/// Whether an instruction of the plan has a buffer.
bool hasDeviceBuffers(const Plan &plan);

/// Gives every instruction that needs one its buffer, and every gather its
/// source; the life of a buffer ends with the first instruction of the compute
/// stream at whose end its users are complete. Does nothing for a plan that has
/// buffers.
void addDeviceBuffers(Plan &plan);

} // namespace fsdp::plan

#endif // FSDP_PLAN_DEVICEBUFFERS_H
