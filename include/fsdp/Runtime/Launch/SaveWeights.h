//===- SaveWeights.h - the final weights of a run -------------------------===//
#ifndef FSDP_RUNTIME_LAUNCH_SAVEWEIGHTS_H
#define FSDP_RUNTIME_LAUNCH_SAVEWEIGHTS_H

#include "fsdp/Runtime/Execution/Session.h"
#include "fsdp/Runtime/Files/Files.h"

namespace fsdp::runtime {

/// Gathers every parameter on every rank, as a collective must; rank 0, which
/// has the file, writes the parameters under all their names, and the
/// persistent buffers. Throws RunError.
void saveWeights(const plan::Plan &plan, Session &session, OutputFile *file);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_LAUNCH_SAVEWEIGHTS_H
