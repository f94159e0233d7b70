// RUN: fsdp-opt --fsdp-insert-clipping --split-input-file %s | FileCheck %s

// A module's own parameter, @a.scale, comes before its child's, @a.in.w, in
// model.parameters().

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[R:.*]]:2 = fsdp.reduce_scatter @u avg [@a.in.w, @a.scale]
// CHECK-NEXT:    fsdp.phase optimizer
// CHECK-NEXT:    %[[C:.*]]:2 = fsdp.clip_grad_norm [@a.scale, @a.in.w] %[[R]]#1, %[[R]]#0 {max_norm = 5.000000e-01 : f64, norm_type = 2.000000e+00 : f64}
// CHECK-NEXT:    fsdp.gradients [@a.in.w, @a.scale] %[[C]]#1, %[[C]]#0
// CHECK-NEXT:    fsdp.return
fsdp.mesh @world <["shard"=2]>
fsdp.gradient_clipping {max_norm = 0.5, norm_type = 2.0}
fsdp.unit @u
fsdp.param @a.in.w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]> {position = 1 : i64}
fsdp.param @a.scale : tensor<4xf32> unit @u sharding <@world, [{"shard"}]> {position = 0 : i64}
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %r:2 = fsdp.reduce_scatter @u avg [@a.in.w, @a.scale] %x, %x : (tensor<4xf32>, tensor<4xf32>) -> (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>)
  fsdp.gradients [@a.in.w, @a.scale] %r#0, %r#1 : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}

// -----

// A tied parameter has the place of its first name there, which the names of
// the ops do not tell; a frozen parameter takes no part.

// CHECK: fsdp.clip_grad_norm [@z, @m.a.own, @m.own, @m.b.w, @m.a.deep.w, @n.w]
fsdp.mesh @world <["shard"=2]>
fsdp.gradient_clipping {max_norm = 0.5, norm_type = 2.0}
fsdp.param @m.b.w : tensor<4xf32> sharding <@world, [{"shard"}]> {position = 3 : i64}
fsdp.param @m.a.deep.w : tensor<4xf32> sharding <@world, [{"shard"}]> {position = 4 : i64}
fsdp.param @m.a.own : tensor<4xf32> sharding <@world, [{"shard"}]> {aliases = ["m.tied"], position = 1 : i64}
fsdp.param @m.own : tensor<4xf32> sharding <@world, [{"shard"}]> {position = 2 : i64}
fsdp.param @n.w : tensor<4xf32> sharding <@world, [{"shard"}]> {position = 5 : i64}
fsdp.param @n.frozen : tensor<4xf32> sharding <@world, [{"shard"}]> {frozen, position = 6 : i64}
fsdp.param @z : tensor<4xf32> sharding <@world, [{"shard"}]> {position = 0 : i64}
fsdp.program @train_step(%loss: tensor<f32>) -> tensor<f32> {
  %s = fsdp.read @z : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.gradients [@m.b.w, @m.a.deep.w, @m.a.own, @m.own, @n.w, @z] %s, %s, %s, %s, %s, %s : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}

// -----

// Without the policy nothing changes.

// CHECK-LABEL: fsdp.program @unclipped
// CHECK-NOT:     fsdp.clip_grad_norm
fsdp.mesh @world <["shard"=2]>
fsdp.param @z : tensor<4xf32> sharding <@world, [{"shard"}]>
fsdp.program @unclipped(%loss: tensor<f32>) -> tensor<f32> {
  %s = fsdp.read @z : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.gradients [@z] %s : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}
