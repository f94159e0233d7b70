// RUN: fsdp-opt --fsdp-stage-checkpoints --split-input-file %s | FileCheck %s
// RUN: fsdp-opt --fsdp-stage-checkpoints --fsdp-insert-frees --split-input-file %s | FileCheck %s --check-prefix=PLANNED

// The state that the step before has left is copied while forward and backward
// read it. A unit that nothing updates is not copied.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[G:.*]] = fsdp.all_gather @u
// CHECK-NEXT:    %[[U:.*]] = fsdp.stage_state @u {fsdp.why = "where forward first uses the unit"} : !fsdp.future<>
// CHECK-NEXT:    fsdp.wait %[[G]]
// CHECK:         %[[V:.*]] = fsdp.stage_state @v {fsdp.why = "forward does not use the unit"} : !fsdp.future<>
// CHECK-NEXT:    fsdp.phase backward
// CHECK-NOT:     fsdp.stage_state
// CHECK:         fsdp.wait %[[U]] : !fsdp.future<>
// CHECK-NEXT:    fsdp.wait %[[V]] : !fsdp.future<>
// CHECK-NEXT:    fsdp.phase optimizer
// PLANNED:       fsdp.wait %{{.*}} : !fsdp.future<>
fsdp.mesh @world <["shard"=2]>
fsdp.schedule {stage_checkpoints = true}
fsdp.optimizer "sgd" {lr = 1.0}
fsdp.unit @u
fsdp.unit @v
fsdp.unit @frozen
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @v.w : tensor<4xf32> unit @v sharding <@world, [{"shard"}]>
fsdp.param @f.w : tensor<4xf32> unit @frozen sharding <@world, [{"shard"}]> {frozen}
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %f = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.future<tensor<4xf32>>
  %w = fsdp.wait %f : !fsdp.future<tensor<4xf32>>
  %y = aten.call "aten::mul.Tensor"(%x, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  fsdp.reshard @u %w : tensor<4xf32>
  %loss = aten.call "aten::sum"(%y, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %r0 = fsdp.reduce_scatter @u avg [@w] %x : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %r1 = fsdp.reduce_scatter @v avg [@v.w] %x : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.phase optimizer
  fsdp.optimizer_step [@w, @v.w] %r0, %r1 : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}

// -----

// Without the policy nothing changes.

// CHECK-LABEL: fsdp.program @train_step
// CHECK-NOT:     fsdp.stage_state
fsdp.mesh @world <["shard"=2]>
fsdp.optimizer "sgd" {lr = 1.0}
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %r0 = fsdp.reduce_scatter @u avg [@w] %x : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.phase optimizer
  fsdp.optimizer_step [@w] %r0 : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}

// -----

// A step without backward, whose gradients forward itself computes.
// CHECK-LABEL: fsdp.program @no_backward
// CHECK:         %[[W:.*]] = fsdp.stage_state @w {fsdp.why = "forward does not use the unit"} : !fsdp.future<>
// CHECK-NEXT:    fsdp.wait %[[W]] : !fsdp.future<>
// CHECK-NEXT:    fsdp.phase optimizer
fsdp.mesh @world <["shard"=2]>
fsdp.schedule {stage_checkpoints = true}
fsdp.optimizer "sgd" {lr = 0.5}
fsdp.unit @w
fsdp.param @p : tensor<4xf32> unit @w sharding <@world, [{"shard"}]>
fsdp.program @no_backward(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  %r = fsdp.reduce_scatter @w avg [@p] %x : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.phase optimizer
  fsdp.optimizer_step [@p] %r : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %l : tensor<f32>
}
