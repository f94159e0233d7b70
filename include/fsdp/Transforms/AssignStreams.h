//===- AssignStreams.h - streams and events of a program's ops ------------===//
#ifndef FSDP_TRANSFORMS_ASSIGNSTREAMS_H
#define FSDP_TRANSFORMS_ASSIGNSTREAMS_H

#include "fsdp/Dialect/FSDP.h"

namespace mlir::fsdp {

/// Sets `fsdp.stream`, `fsdp.waits` and `fsdp.records` of the ops of a program.
void assignStreams(ProgramOp program);
/// Takes them away, with the `fsdp.mark`s of the program.
void clearStreams(ProgramOp program);

} // namespace mlir::fsdp

#endif // FSDP_TRANSFORMS_ASSIGNSTREAMS_H
