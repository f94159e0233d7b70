// RUN: fsdp-opt --fsdp-insert-loss-scaling --split-input-file %s | FileCheck %s

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         fsdp.phase backward
// CHECK-NEXT:    %[[SCALE:.*]] = fsdp.loss_scale : tensor<f32>
// CHECK-NEXT:    %[[G:.*]] = aten.call "aten::mul.Tensor"(%{{.*}}, %[[SCALE]])
// CHECK-NEXT:    %[[R:.*]] = fsdp.reduce_scatter @u avg [@w] %[[G]]
// CHECK-NEXT:    fsdp.phase optimizer
// CHECK-NEXT:    %[[U:.*]] = fsdp.unscale [@w] %[[R]] : (!fsdp.sharded<
// CHECK-NEXT:    fsdp.gradients [@w] %[[U]] : !fsdp.sharded<
// CHECK-NEXT:    fsdp.return
fsdp.mesh @world <["shard"=2]>
fsdp.grad_scaler {backoff_factor = 0.5, growth_factor = 2.0, growth_interval = 2000, init_scale = 65536.0}
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%loss, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
  %g = aten.call "aten::mul.Tensor"(%x, %one) : (tensor<4xf32>, tensor<f32>) -> tensor<4xf32>
  %r = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.gradients [@w] %r : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}

// -----

// A loss in f16: the scale is cast, as autograd casts a gradient. A fused
// optimizer divides.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         fsdp.phase backward
// CHECK-NEXT:    %[[SCALE:.*]] = fsdp.loss_scale : tensor<f32>
// CHECK-NEXT:    %[[ONE:.*]] = aten.call "aten::ones_like"
// CHECK-NEXT:    %[[SEED:.*]] = aten.call "aten::copy"(%[[ONE]], %[[SCALE]], false) : (tensor<f16>, tensor<f32>) -> tensor<f16>
// CHECK-NEXT:    aten.call "aten::mul.Tensor"(%{{.*}}, %[[SEED]])
// CHECK:         fsdp.unscale [@w] %{{.*}} {deferred} : (!fsdp.sharded<
fsdp.mesh @world <["shard"=2]>
fsdp.optimizer "adamw" {fused = true}
fsdp.grad_scaler {backoff_factor = 0.5, growth_factor = 2.0, growth_interval = 2000, init_scale = 65536.0}
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f16> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f16>
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%loss, none, none, none, false, 1) : (tensor<f16>) -> tensor<f16>
  %g = aten.call "aten::mul.Tensor"(%x, %one) : (tensor<4xf32>, tensor<f16>) -> tensor<4xf32>
  %r = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.gradients [@w] %r : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f16>
}

// -----

// Clipping needs unscaled gradients.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         fsdp.unscale
// CHECK-NOT:     deferred
// CHECK:         fsdp.return
fsdp.mesh @world <["shard"=2]>
fsdp.optimizer "adamw" {fused = true}
fsdp.gradient_clipping {max_norm = 1.0, norm_type = 2.0}
fsdp.grad_scaler {backoff_factor = 0.5, growth_factor = 2.0, growth_interval = 2000, init_scale = 65536.0}
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%loss, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
  %r = fsdp.reduce_scatter @u avg [@w] %x : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.gradients [@w] %r : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}
