//===- Messages.h - which gradients FSDP2 reduces together ----------------===//
#ifndef FSDP_PLAN_MESSAGES_H
#define FSDP_PLAN_MESSAGES_H

#include "fsdp/Plan/Plan.h"

#include <cstdint>
#include <vector>

namespace fsdp::plan {

/// Where a parameter's gradient is in what FSDP2 reduces: the gradients of a
/// unit, one behind the other in each rank's row, padded to chunkElements. The
/// unit is Param::reducedWith, or the parameter's own.
struct MessagePlace {
  int64_t begin = 0; ///< in each row, in elements
  int64_t row = 0;   ///< elements of a row; 0 for what is not reduced
};

/// That of every parameter.
std::vector<MessagePlace> messagePlaces(const Plan &plan);

/// Gloo adds around a ring (gloo/allreduce.cc; torch.distributed reduces and
/// scatters by it, too): a message is cut into a piece for each of the ranks,
/// and what is in piece c is the sum of the terms of the ranks c - 1, c - 2 and
/// so on down to c, modulo the number of ranks. Returns the elements of a piece
/// of a message of `elements`, at least one, of `width` bytes each; the last
/// pieces may be shorter, or missing.
int64_t ringPiece(int64_t elements, int64_t width, int64_t ranks);

} // namespace fsdp::plan

#endif // FSDP_PLAN_MESSAGES_H
