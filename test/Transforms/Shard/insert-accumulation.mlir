// RUN: fsdp-opt --fsdp-insert-accumulation --split-input-file %s | FileCheck %s

// FSDP2's default: every microbatch reduces, the shards are added.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[ONE:.*]] = aten.call "aten::ones_like"
// CHECK-NEXT:    %[[SEED:.*]] = aten.call "aten::div.Scalar"(%[[ONE]], 4) : (tensor<f32>) -> tensor<f32>
// CHECK-NEXT:    %[[G:.*]] = aten.call "aten::mul.Tensor"(%{{.*}}, %[[SEED]])
// CHECK-NEXT:    %[[R:.*]] = fsdp.reduce_scatter @u avg [@w] %[[G]] :
// CHECK-NEXT:    %[[SUM:.*]] = fsdp.accumulate [@w] %[[R]] : (!fsdp.sharded<
// CHECK-NEXT:    fsdp.write_grad @w, %[[SUM]]
// CHECK-NEXT:    fsdp.return
fsdp.mesh @world <["shard"=2]>
fsdp.accumulation {reduce_each_microbatch = true, steps = 4}
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%loss, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
  %g = aten.call "aten::mul.Tensor"(%x, %one) : (tensor<4xf32>, tensor<f32>) -> tensor<4xf32>
  %r = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.write_grad @w, %r : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}

// -----

// Whole gradients are added; the last microbatch reduces the sums.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         aten.call "aten::div.Scalar"
// CHECK-NEXT:    %[[G:.*]] = aten.call "aten::mul.Tensor"
// CHECK-NEXT:    %[[SUM:.*]] = fsdp.accumulate [@w] %[[G]] : (tensor<4xf32>) -> tensor<4xf32>
// CHECK-NEXT:    %[[R:.*]] = fsdp.reduce_scatter @u avg [@w] %[[SUM]] {last_microbatch}
// CHECK-NEXT:    fsdp.write_grad @w, %[[R]]
// CHECK-NEXT:    fsdp.return
fsdp.mesh @world <["shard"=2]>
fsdp.accumulation {reduce_each_microbatch = false, steps = 4}
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%loss, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
  %g = aten.call "aten::mul.Tensor"(%x, %one) : (tensor<4xf32>, tensor<f32>) -> tensor<4xf32>
  %r = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.write_grad @w, %r : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}

// -----

// One microbatch is what there is without the policy.

// CHECK-LABEL: fsdp.program @train_step
// CHECK-NOT:     fsdp.accumulate
// CHECK-NOT:     aten::div
fsdp.mesh @world <["shard"=2]>
fsdp.accumulation {reduce_each_microbatch = true, steps = 1}
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%loss, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
  %g = aten.call "aten::mul.Tensor"(%x, %one) : (tensor<4xf32>, tensor<f32>) -> tensor<4xf32>
  %r = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.write_grad @w, %r : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}
