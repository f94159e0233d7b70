// RUN: fsdp-opt --fsdp-insert-offload-copies --split-input-file %s | FileCheck %s

// Shards of an offloaded unit lie on the host: each gather takes copies, and
// gradients go back before they are written. Other units are left alone.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[S:.*]] = fsdp.read @w
// CHECK-NEXT:    %[[D:.*]] = fsdp.copy_to_device @u %[[S]] : (!fsdp.sharded<tensor<4x4xf32>, <@world, [{"shard"}, {}]>>) -> !fsdp.sharded<tensor<4x4xf32>, <@world, [{"shard"}, {}]>>
// CHECK-NEXT:    %[[W:.*]] = fsdp.all_gather @u %[[D]]
// CHECK:         %[[B:.*]] = fsdp.read @b
// CHECK-NEXT:    fsdp.all_gather @v %[[B]]
// CHECK:         fsdp.phase backward
// CHECK:         %[[R:.*]] = fsdp.reduce_scatter @u avg [@w]
// CHECK:         %[[RB:.*]] = fsdp.reduce_scatter @v avg [@b]
// CHECK-NEXT:    %[[H:.*]] = fsdp.copy_to_host @u [@w] %[[R]] : (!fsdp.sharded<tensor<4x4xf32>, <@world, [{"shard"}, {}]>>) -> !fsdp.sharded<tensor<4x4xf32>, <@world, [{"shard"}, {}]>>
// CHECK-NEXT:    fsdp.gradients [@w, @b] %[[H]], %[[RB]]
// CHECK-NEXT:    fsdp.return
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u {cpu_offload}
fsdp.unit @v
fsdp.param @w : tensor<4x4xf32> unit @u sharding <@world, [{"shard"}, {}]>
fsdp.param @b : tensor<4x4xf32> unit @v sharding <@world, [{"shard"}, {}]>
fsdp.program @train_step(%x: tensor<4x4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %s = fsdp.read @w : !fsdp.sharded<tensor<4x4xf32>, <@world, [{"shard"}, {}]>>
  %w = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4x4xf32>, <@world, [{"shard"}, {}]>>) -> tensor<4x4xf32>
  %y = aten.call "aten::mm"(%x, %w) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %t = fsdp.read @b : !fsdp.sharded<tensor<4x4xf32>, <@world, [{"shard"}, {}]>>
  %b = fsdp.all_gather @v %t : (!fsdp.sharded<tensor<4x4xf32>, <@world, [{"shard"}, {}]>>) -> tensor<4x4xf32>
  %z = aten.call "aten::mm"(%y, %b) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %loss = aten.call "aten::sum"(%z, none) : (tensor<4x4xf32>) -> tensor<f32>
  fsdp.phase backward
  %r = fsdp.reduce_scatter @u avg [@w] %x : (tensor<4x4xf32>) -> !fsdp.sharded<tensor<4x4xf32>, <@world, [{"shard"}, {}]>>
  %q = fsdp.reduce_scatter @v avg [@b] %y : (tensor<4x4xf32>) -> !fsdp.sharded<tensor<4x4xf32>, <@world, [{"shard"}, {}]>>
  fsdp.gradients [@w, @b] %r, %q : !fsdp.sharded<tensor<4x4xf32>, <@world, [{"shard"}, {}]>>, !fsdp.sharded<tensor<4x4xf32>, <@world, [{"shard"}, {}]>>
  fsdp.return %loss : tensor<f32>
}

// -----

// An evaluation copies too; without offload there is nothing to do.

// CHECK-LABEL: fsdp.program @train_step
// CHECK-NOT:     fsdp.copy
// CHECK-LABEL: fsdp.program @evaluate
// CHECK:         %[[D:.*]] = fsdp.copy_to_device @u
// CHECK-NEXT:    fsdp.all_gather @u %[[D]]
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u {cpu_offload}
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.return %l : tensor<f32>
}
fsdp.program @evaluate(%x: tensor<4xf32>) -> tensor<f32> attributes {evaluation} {
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %w = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  %l = aten.call "aten::dot"(%x, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
  fsdp.reshard @u %w : tensor<4xf32>
  fsdp.return %l : tensor<f32>
}

// -----

// A unit that is reduced behind each of two calls has one copy of all.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[A:.*]] = fsdp.reduce_scatter @u avg [@a]
// CHECK-NEXT:    %[[B:.*]] = fsdp.reduce_scatter @u avg [@b]
// CHECK-NEXT:    %[[H:.*]]:2 = fsdp.copy_to_host @u [@a, @b] %[[A]], %[[B]]
// CHECK-NEXT:    fsdp.gradients [@a, @b] %[[H]]#0, %[[H]]#1
// CHECK-NEXT:    fsdp.return
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u {cpu_offload}
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @b : tensor<4xf32> unit @u sharding <@world, [{"shard"}]> {post_backward = 1 : i64}
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %r = fsdp.reduce_scatter @u avg [@a] %x : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %q = fsdp.reduce_scatter @u avg [@b] %x : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.gradients [@a, @b] %r, %q : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}
