//===- Passes.h - passes and pipelines of fsdp-opt ------------------------===//
#ifndef FSDP_TRANSFORMS_PASSES_H
#define FSDP_TRANSFORMS_PASSES_H

#include "fsdp/Dialect/Aten.h"
#include "fsdp/Dialect/FSDP.h"
#include "fsdp/Transforms/LevelPass.h"
#include "mlir/IR/BuiltinOps.h"
#include "mlir/Pass/Pass.h"

namespace mlir::fsdp {

#define GEN_PASS_DECL
#define GEN_PASS_REGISTRATION
#include "fsdp/Transforms/Passes.h.inc"

/// The stages, in order; each is also a pipeline of its own name.
void buildShardPipeline(OpPassManager &pm); ///< --fsdp-shard
/// The part of it that follows fsdp-choose-memory.
void buildAfterChoicePipeline(OpPassManager &pm);
void buildSchedulePipeline(OpPassManager &pm); ///< --fsdp-schedule
void buildLowerPipeline(OpPassManager &pm);    ///< --fsdp-lower
/// The part of it that precedes fsdp-insert-buffers.
void buildUnplacedPipeline(OpPassManager &pm);
/// All stages: captured level to planned level (--fsdp-pipeline).
void buildPipeline(OpPassManager &pm);
/// Registers the four with the pass registry.
void registerPipelines();

} // namespace mlir::fsdp

#endif // FSDP_TRANSFORMS_PASSES_H
