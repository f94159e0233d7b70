//===- Messages.h - which gradients FSDP2 reduces together ----------------===//
#ifndef FSDP_PLAN_MESSAGES_H
#define FSDP_PLAN_MESSAGES_H

#include "fsdp/Plan/Plan.h"

#include <cstdint>
#include <vector>

namespace fsdp::plan {

/// Where a parameter's gradient is in what FSDP2 reduces: gradients of a unit,
/// one behind the other in each rank's row, padded to chunkElements.
struct MessagePlace {
  int64_t begin = 0; ///< in each row, in elements
  int64_t row = 0;   ///< elements of a row
};

class Messages {
public:
  /// The plan must outlive it.
  explicit Messages(const Plan &plan);

  /// The places of those that an instruction reduces together. They are one
  /// message; but those of another unit (Param::reducedWith) are in the message
  /// of all that are reduced with that.
  std::vector<MessagePlace>
  messagePlaces(const std::vector<int32_t> &params) const;

private:
  const Plan &plan;
  std::vector<MessagePlace> ofOthers; ///< by parameter
};

/// Gloo adds around a ring (gloo/allreduce.cc; torch.distributed reduces and
/// scatters by it, too): a message is cut into a piece for each of the ranks,
/// and what is in piece c is the sum of the terms of the ranks c - 1, c - 2 and
/// so on down to c, modulo the number of ranks. Returns the elements of a piece
/// of a message of `elements`, at least one, of `width` bytes each; the last
/// pieces may be shorter, or missing.
int64_t ringPiece(int64_t elements, int64_t width, int64_t ranks);

} // namespace fsdp::plan

#endif // FSDP_PLAN_MESSAGES_H
