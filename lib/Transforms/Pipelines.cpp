//===- Pipelines.cpp - the whole story on one page ------------------------===//
#include "fsdp/Transforms/Passes.h"
#include "mlir/Pass/PassManager.h"
#include "mlir/Pass/PassRegistry.h"

using namespace mlir;
using namespace mlir::fsdp;

void mlir::fsdp::buildShardPipeline(OpPassManager &pm) {
  pm.addPass(createDetectUnits());  // repeated modules -> patterns
  pm.addPass(createAssignUnits());  // patterns -> units
  pm.addPass(createChooseMemory()); // budget -> what is kept
  buildAfterChoicePipeline(pm);
}

void mlir::fsdp::buildAfterChoicePipeline(OpPassManager &pm) {
  pm.addPass(createBucketUnits());          // units -> buckets
  pm.addPass(createChunkLoss());            // logits -> a part at a time
  pm.addPass(createRecomputeActivations()); // checkpoints -> calls in backward
  pm.addPass(createSimplifyCalls());        // what autograd alone needed
  pm.addPass(createOffloadActivations());   // activations <-> the host's
  pm.addPass(createPlaceParams());          // parameters -> shards
  pm.addPass(createInsertAllGathers());     // whole reads -> gather a unit
  pm.addPass(createInsertReshards());       // free after forward, gather again
  pm.addPass(createInsertReduceScatters()); // whole gradients -> shards
  pm.addPass(createInsertAllReduces());     // shards' averages over replicas
  pm.addPass(createInsertOffloadCopies());  // host's shards <-> device's
  pm.addPass(createInsertAccumulation());   // microbatches' gradients -> sums
  pm.addPass(createDeferReshards());        // keep for the next microbatch
  pm.addPass(createInsertLossScaling());    // loss and gradients <-> scaled
  pm.addPass(createInsertClipping());       // gradient shards -> clipped
  pm.addPass(createInsertOptimizer());      // gradient shards -> update
}

void mlir::fsdp::buildSchedulePipeline(OpPassManager &pm) {
  pm.addPass(createSplitCollectives()); // collectives -> begin and wait
  pm.addPass(createDelayReduceWaits()); // reduce while computation goes on
  pm.addPass(createOverlapActivationCopies()); // copy meanwhile
  pm.addPass(createPrefetchAllGathers());      // gather before it is needed
  pm.addPass(createStageCheckpoints());        // copy what a checkpoint takes
  pm.addPass(createFuseCalls());               // chains of calls -> kernels
}

void mlir::fsdp::buildLowerPipeline(OpPassManager &pm) {
  buildUnplacedPipeline(pm);
  pm.addPass(createInsertBuffers());  // memory of collectives
  pm.addPass(createCompileKernels()); // kernels -> machine code
  pm.addPass(createPlaceStorages());  // a place for every storage
}

void mlir::fsdp::buildUnplacedPipeline(OpPassManager &pm) {
  pm.addPass(createBindReduceInputs()); // gradients straight into the reduction
  pm.addPass(createInsertFrees());      // the end of every value's life
  pm.addPass(createAssignStreams());    // what runs beside what
}

void mlir::fsdp::buildPipeline(OpPassManager &pm) {
  buildShardPipeline(pm);
  buildSchedulePipeline(pm);
  buildLowerPipeline(pm);
}

void mlir::fsdp::registerPipelines() {
  PassPipelineRegistration<>("fsdp-shard", "captured level to sharded level",
                             buildShardPipeline);
  PassPipelineRegistration<>("fsdp-schedule",
                             "sharded level to scheduled level",
                             buildSchedulePipeline);
  PassPipelineRegistration<>("fsdp-lower", "scheduled level to planned level",
                             buildLowerPipeline);
  PassPipelineRegistration<>("fsdp-pipeline", "captured level to planned level",
                             buildPipeline);
}
