// RUN: fsdp-opt --fsdp-split-collectives --split-input-file %s | FileCheck %s

// Each collective begins where it stood, and is awaited at once.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[S:.*]] = fsdp.read @w
// CHECK-NEXT:    %[[F:.*]] = fsdp.all_gather @u %[[S]] : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.future<tensor<4xf32>>
// CHECK-NEXT:    %[[W:.*]] = fsdp.wait %[[F]] : !fsdp.future<tensor<4xf32>>
// CHECK-NEXT:    aten.call "aten::dot"(%{{.*}}, %[[W]])
// CHECK-NEXT:    fsdp.reshard @u %[[W]]
// CHECK:         %[[RF:.*]] = fsdp.reduce_scatter @u avg [@w] %{{.*}} -> !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
// CHECK-NEXT:    %[[R:.*]] = fsdp.wait %[[RF]]
// CHECK-NEXT:    fsdp.gradients [@w] %[[R]]
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %w = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  %loss = aten.call "aten::dot"(%x, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
  fsdp.reshard @u %w : tensor<4xf32>
  fsdp.phase backward
  %g = aten.call "aten::neg"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %r = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.gradients [@w] %r : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}

// -----

// Conditions stay; what has begun already stays as it is.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:           %[[F:.*]] = fsdp.all_gather @u %{{.*}} when %first else %[[KEPT:.*]] : !fsdp.carried<tensor<4xf32>> : ({{.*}}) -> !fsdp.future<tensor<4xf32>>
// CHECK-NEXT:      aten.call "aten::neg"
// CHECK-NEXT:      %[[W:.*]] = fsdp.wait %[[F]]
// CHECK:           %[[RF:.*]] = fsdp.reduce_scatter @u avg [@w] %{{.*}} when %last : {{.*}} -> !fsdp.future
// CHECK-NEXT:      %[[R:.*]] = fsdp.wait %[[RF]]
// CHECK-NEXT:      %[[CF:.*]] = fsdp.copy_to_host @u [@w] %[[R]] when %last : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
// CHECK-NEXT:      %[[C:.*]] = fsdp.wait %[[CF]]
// CHECK-NEXT:      fsdp.reshard @u %[[W]] when %last
// CHECK-NEXT:      fsdp.yield %{{.*}}, %[[C]] : {{.*}} carry %[[SUM:.*]], %[[W]] :
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u {cpu_offload}
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  %loss, %grad = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> (tensor<f32>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1, %before: !fsdp.carried<tensor<4xf32>>, %kept: !fsdp.carried<tensor<4xf32>>):
    fsdp.phase forward
    %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
    %f = fsdp.all_gather @u %s when %first else %kept : !fsdp.carried<tensor<4xf32>> : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.future<tensor<4xf32>>
    %y = aten.call "aten::neg"(%x) : (tensor<4xf32>) -> tensor<4xf32>
    %w = fsdp.wait %f : !fsdp.future<tensor<4xf32>>
    %l = aten.call "aten::dot"(%y, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
    fsdp.phase backward
    %sum = fsdp.accumulate [@w] %y onto %before : !fsdp.carried<tensor<4xf32>> : (tensor<4xf32>) -> tensor<4xf32>
    %r = fsdp.reduce_scatter @u avg [@w] %sum when %last : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
    %c = fsdp.copy_to_host @u [@w] %r when %last : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
    fsdp.reshard @u %w when %last : tensor<4xf32>
    fsdp.yield %l, %c : tensor<f32>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>> carry %sum, %w : tensor<4xf32>, tensor<4xf32>
  }
  fsdp.gradients [@w] %grad : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}
