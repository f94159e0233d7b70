// RUN: fsdp-opt --fsdp-insert-reduce-scatters --fsdp-insert-all-reduces --split-input-file --verify-diagnostics %s | FileCheck %s

// FSDP2's set_gradient_divide_factor and set_force_sum_reduction_for_comms.

// A sum, divided after.

// CHECK: fsdp.reduce_scatter @u sum [@w] %{{.*}} {postdivide = 8.000000e+00 : f64, predivide = 1.000000e+00 : f64}
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u {gradient_division = #fsdp.gradient_division<factor = 8.0 : f64, force_sum = true>}
fsdp.param @w : tensor<4x4xf32> unit @u sharding <@world, [{"shard"}, {}]>
fsdp.program @train_step(%x: tensor<4x4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4x4xf32>) -> tensor<f32>
  fsdp.phase backward
  %g = aten.call "aten::mm"(%x, %x) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  fsdp.gradients [@w] %g : tensor<4x4xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// By all ranks, after both reductions.

// CHECK: fsdp.reduce_scatter @u sum [@w] %{{.*}} {predivide = 1.000000e+00 : f64}
// CHECK: fsdp.all_reduce @u sum over "replicate" [@w] %{{.*}} {postdivide = 4.000000e+00 : f64}
fsdp.mesh @world <["replicate"=2, "shard"=2]>
fsdp.unit @u {gradient_division = #fsdp.gradient_division<force_sum = true>}
fsdp.param @w : tensor<4x4xf32> unit @u sharding <@world, [{"shard"}, {}]>
fsdp.program @train_step(%x: tensor<4x4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4x4xf32>) -> tensor<f32>
  fsdp.phase backward
  %g = aten.call "aten::mm"(%x, %x) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  fsdp.gradients [@w] %g : tensor<4x4xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// By the shards alone: the sum over the replicas is not divided.

// CHECK: fsdp.reduce_scatter @u avg [@w] %{{.*}} : (
// CHECK: fsdp.all_reduce @u sum over "replicate" [@w] %{{.*}} : (
fsdp.mesh @world <["replicate"=2, "shard"=2]>
fsdp.unit @u {gradient_division = #fsdp.gradient_division<factor = 2.0 : f64>}
fsdp.param @w : tensor<4x4xf32> unit @u sharding <@world, [{"shard"}, {}]>
fsdp.program @train_step(%x: tensor<4x4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4x4xf32>) -> tensor<f32>
  fsdp.phase backward
  %g = aten.call "aten::mm"(%x, %x) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  fsdp.gradients [@w] %g : tensor<4x4xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// Another factor is a product with its reciprocal before the sum (PREMUL_SUM).

// CHECK: fsdp.reduce_scatter @u sum [@w] %{{.*}} {premultiply = 1.250000e-01 : f64}
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u {gradient_division = #fsdp.gradient_division<factor = 8.0 : f64>}
fsdp.param @w : tensor<4x4xf32> unit @u sharding <@world, [{"shard"}, {}]>
fsdp.program @train_step(%x: tensor<4x4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4x4xf32>) -> tensor<f32>
  fsdp.phase backward
  %g = aten.call "aten::mm"(%x, %x) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  fsdp.gradients [@w] %g : tensor<4x4xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// Each unit by its own factor.

// CHECK: fsdp.reduce_scatter @u sum [@w] %{{.*}} {postdivide = 8.000000e+00 : f64, predivide = 1.000000e+00 : f64}
// CHECK: fsdp.reduce_scatter @v avg [@x] %{{[^ ]*}} : (
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u {gradient_division = #fsdp.gradient_division<factor = 8.0 : f64, force_sum = true>}
fsdp.unit @v
fsdp.param @w : tensor<4x4xf32> unit @u sharding <@world, [{"shard"}, {}]>
fsdp.param @x : tensor<4x4xf32> unit @v sharding <@world, [{"shard"}, {}]>
fsdp.program @train_step(%x: tensor<4x4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4x4xf32>) -> tensor<f32>
  fsdp.phase backward
  %g = aten.call "aten::mm"(%x, %x) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %h = aten.call "aten::mm"(%g, %x) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  fsdp.gradients [@w, @x] %g, %h : tensor<4x4xf32>, tensor<4x4xf32>
  fsdp.return %loss : tensor<f32>
}
