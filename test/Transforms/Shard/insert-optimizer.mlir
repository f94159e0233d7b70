// RUN: fsdp-opt --fsdp-insert-optimizer --split-input-file %s | FileCheck %s

// The update comes last, over the parameters in the order of the module.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[R:.*]]:2 = fsdp.reduce_scatter @u avg [@w, @b]
// CHECK-NEXT:    fsdp.phase optimizer
// CHECK-NEXT:    fsdp.optimizer_step [@w, @b] %[[R]]#0, %[[R]]#1
// CHECK-NEXT:    fsdp.return
fsdp.mesh @world <["shard"=2]>
fsdp.optimizer "adamw" {lr = 3.0e-4, fused = true}
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @b : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %r:2 = fsdp.reduce_scatter @u avg [@w, @b] %x, %x : (tensor<4xf32>, tensor<4xf32>) -> (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>)
  fsdp.gradients [@w, @b] %r#0, %r#1 : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}

// -----

// The first group that matches a name or an alias; the phase may have begun.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         fsdp.phase optimizer
// CHECK-NOT:     fsdp.phase optimizer
// CHECK:         fsdp.optimizer_step [@a.w, @a.bias, @emb] %{{.*}} {groups = array<i64: 3, 1, 2>}
fsdp.mesh @world <["shard"=2]>
fsdp.optimizer "adamw" {lr = 3.0e-4}
fsdp.param_group "**.bias", "*.bias" {weight_decay = 0.0}
fsdp.param_group "head.*" {lr = 1.0e-4}
fsdp.param_group "**" {lr = 1.0}
fsdp.param @a.w : tensor<4xf32> sharding <@world, [{"shard"}]>
fsdp.param @a.bias : tensor<4xf32> sharding <@world, [{"shard"}]>
fsdp.param @emb : tensor<4xf32> sharding <@world, [{"shard"}]> {aliases = ["head.w"]}
fsdp.program @train_step(%loss: tensor<f32>) -> tensor<f32> {
  %s = fsdp.read @emb : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.phase optimizer
  fsdp.gradients [@a.w, @a.bias, @emb] %s, %s, %s : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}
