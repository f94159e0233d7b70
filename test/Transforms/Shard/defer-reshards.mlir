// RUN: fsdp-opt --fsdp-defer-reshards --split-input-file %s | FileCheck %s

// What backward gathered serves the next microbatch's forward. Unit @v, which
// backward does not use, is gathered for each.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[W:.*]] = fsdp.all_gather @u %{{.*}} {first_microbatch}
// CHECK-NEXT:    aten.call
// CHECK-NEXT:    fsdp.reshard @u %[[W]] : tensor<4xf32>{{$}}
// CHECK:         fsdp.all_gather @v %{{[^ ]*}} : (
// CHECK-NEXT:    aten.call
// CHECK-NEXT:    fsdp.reshard @v %{{[^ ]*}} : tensor<4xf32>{{$}}
// CHECK-NEXT:    fsdp.phase backward
// CHECK:         %[[W2:.*]] = fsdp.all_gather @u %{{[^ ]*}} : (
// CHECK-NEXT:    aten.call
// CHECK-NEXT:    fsdp.no_gradient
// CHECK-NEXT:    fsdp.reshard @u %[[W2]] {fsdp.why = "at the end of the last microbatch: the next one uses what this one gathered", last_microbatch} : tensor<4xf32>
// CHECK-NEXT:    fsdp.gradients
// CHECK-NEXT:    fsdp.return
fsdp.mesh @world <["shard"=2]>
fsdp.accumulation {reduce_each_microbatch = true, reshard_after_backward = false, steps = 2}
fsdp.unit @u
fsdp.unit @v
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @b : tensor<4xf32> unit @v sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %w = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  %h = aten.call "aten::mul.Tensor"(%x, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  fsdp.reshard @u %w : tensor<4xf32>
  %t = fsdp.read @b : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %b = fsdp.all_gather @v %t : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  %loss = aten.call "aten::dot"(%h, %b) : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
  fsdp.reshard @v %b : tensor<4xf32>
  fsdp.phase backward
  %s2 = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %w2 = fsdp.all_gather @u %s2 : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  %g = aten.call "aten::mul.Tensor"(%x, %w2) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  fsdp.reshard @u %w2 : tensor<4xf32>
  fsdp.no_gradient [@b]
  fsdp.gradients [@w] %g : tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// One microbatch has no next one.

// CHECK-NOT: {{first|last}}_microbatch
// CHECK:     fsdp.phase backward
// CHECK-NOT: {{first|last}}_microbatch
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
