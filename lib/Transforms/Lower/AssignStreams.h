//===- AssignStreams.h - streams and events of a plan's instructions ------===//
#ifndef FSDP_LIB_TRANSFORMS_LOWER_ASSIGNSTREAMS_H
#define FSDP_LIB_TRANSFORMS_LOWER_ASSIGNSTREAMS_H

#include "fsdp/Dialect/FSDP.h"
#include "fsdp/Plan/Plan.h"

#include "llvm/ADT/DenseMap.h"

#include <array>
#include <vector>

namespace mlir::fsdp {

/// Puts the instructions of one list, as they are appended to it, on streams,
/// and gives them the events that order them.
///
/// A collective with a future begins where it stands in the compute stream,
/// after the copies that it takes; an fsdp.wait waits for its event.
class StreamAssigner {
public:
  /// The list of a program; `ops`, if given, has an op for each instruction.
  /// `repeats`: a step runs it once a microbatch.
  StreamAssigner(std::vector<::fsdp::plan::Instruction> &instructions,
                 SmallVectorImpl<Operation *> *ops, bool repeats)
      : instructions(instructions), ops(ops), repeats(repeats) {
    forked.fill(-1);
  }

  /// `op` has become the last instruction of the list.
  void assign(Operation *op);

private:
  /// Lets the last instruction run beside computation.
  void fork(Operation *op);

  std::vector<::fsdp::plan::Instruction> &instructions;
  SmallVectorImpl<Operation *> *ops;
  const bool repeats;
  ::fsdp::plan::EventId numEvents = 0;
  /// Those of collectives and copies beside computation.
  llvm::DenseMap<Operation *, ::fsdp::plan::EventId> eventOf;
  /// The last instruction of the compute stream, and for each stream that up to
  /// which it has waited for it.
  int64_t lastCompute = -1;
  std::array<int64_t, ::fsdp::plan::kNumStreams> forked;
};

} // namespace mlir::fsdp

#endif // FSDP_LIB_TRANSFORMS_LOWER_ASSIGNSTREAMS_H
