// RUN: fsdp-opt --fsdp-defer-reshards --split-input-file %s | FileCheck %s

// What backward gathered serves the next microbatch's forward. Unit @v, which
// backward does not use, is gathered for each.

// CHECK-NOT:   fsdp.accumulation
// CHECK-LABEL: fsdp.program @train_step
// CHECK:         ^bb0(%{{.*}}: tensor<4xf32>, %first: i1, %last: i1, %[[BEFORE:.*]]: !fsdp.carried<{{.*}}>, %[[KEPT:.*]]: !fsdp.carried<tensor<4xf32>>):
// CHECK:           %[[W:.*]] = fsdp.all_gather @u %{{.*}} when %first else %[[KEPT]] : !fsdp.carried<tensor<4xf32>> : (
// CHECK-NEXT:      aten.call
// CHECK-NEXT:      fsdp.reshard @u %[[W]] : tensor<4xf32>{{$}}
// CHECK:           fsdp.all_gather @v %{{[^ ]*}} : (
// CHECK-NEXT:      aten.call
// CHECK-NEXT:      fsdp.reshard @v %{{[^ ]*}} : tensor<4xf32>{{$}}
// CHECK-NEXT:      fsdp.phase backward
// CHECK:           %[[W2:.*]] = fsdp.all_gather @u %{{[^ ]*}} : (
// CHECK-NEXT:      aten.call
// CHECK-NEXT:      %[[R:.*]] = fsdp.reduce_scatter
// CHECK-NEXT:      fsdp.reshard @u %[[W2]] when %last {fsdp.why = "at the end of the last microbatch: the next one uses what this one gathered"} : tensor<4xf32>
// CHECK-NEXT:      %[[S:.*]] = fsdp.accumulate [@w] %[[R]] onto %[[BEFORE]]
// CHECK-NEXT:      fsdp.yield %{{.*}}, %[[S]] : {{.*}} carry %[[S]], %[[W2]] :
fsdp.mesh @world <["shard"=2]>
fsdp.accumulation {reduce_each_microbatch = true, reshard_after_backward = false, steps = 2}
fsdp.unit @u
fsdp.unit @v
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @b : tensor<4xf32> unit @v sharding <@world, [{"shard"}]>
fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  fsdp.no_gradient [@b]
  %loss, %grad = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> (tensor<f32>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1, %before: !fsdp.carried<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>):
    fsdp.phase forward
    %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
    %w = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
    %h = aten.call "aten::mul.Tensor"(%x, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
    fsdp.reshard @u %w : tensor<4xf32>
    %t = fsdp.read @b : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
    %b = fsdp.all_gather @v %t : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
    %l = aten.call "aten::dot"(%h, %b) : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
    fsdp.reshard @v %b : tensor<4xf32>
    fsdp.phase backward
    %s2 = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
    %w2 = fsdp.all_gather @u %s2 : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
    %g = aten.call "aten::mul.Tensor"(%x, %w2) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
    fsdp.reshard @u %w2 : tensor<4xf32>
    %r = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
    %sum = fsdp.accumulate [@w] %r onto %before : !fsdp.carried<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>> : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
    fsdp.yield %l, %sum : tensor<f32>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>> carry %sum : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  }
  fsdp.gradients [@w] %grad : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}

// -----

// One microbatch has no next one.

// CHECK-NOT: when
// CHECK:     fsdp.phase backward
// CHECK-NOT: when
fsdp.mesh @world <["shard"=2]>
fsdp.accumulation {reduce_each_microbatch = true, reshard_after_backward = false, steps = 1}
fsdp.unit @u {reshard_after_forward = false}
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %w = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  %loss = aten.call "aten::dot"(%x, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %g = aten.call "aten::mul.Tensor"(%x, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  fsdp.reshard @u %w : tensor<4xf32>
  fsdp.no_gradient [@w]
  fsdp.return %loss : tensor<f32>
}
