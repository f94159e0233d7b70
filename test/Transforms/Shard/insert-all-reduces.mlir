// RUN: fsdp-opt --fsdp-insert-all-reduces --split-input-file %s | FileCheck %s

// HSDP: the shards of gradients are averaged over the replicas.

// CHECK:      %[[R:.*]] = fsdp.reduce_scatter @u avg [@w]
// CHECK-NEXT: %[[A:.*]] = fsdp.all_reduce @u avg over "replicate" [@w] %[[R]] : (!fsdp.sharded<tensor<4x4xf32>, <@world, [{"shard"}, {}], partial ["replicate"]>>) -> !fsdp.sharded<tensor<4x4xf32>, <@world, [{"shard"}, {}]>>
// CHECK-NEXT: fsdp.gradients [@w] %[[A]]
fsdp.mesh @world <["replicate"=2, "shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4x4xf32> unit @u sharding <@world, [{"shard"}, {}]>
fsdp.program @train_step(%x: tensor<4x4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4x4xf32>) -> tensor<f32>
  fsdp.phase backward
  %g = aten.call "aten::mm"(%x, %x) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %r = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4x4xf32>) -> !fsdp.sharded<tensor<4x4xf32>, <@world, [{"shard"}, {}], partial ["replicate"]>>
  fsdp.gradients [@w] %r : !fsdp.sharded<tensor<4x4xf32>, <@world, [{"shard"}, {}], partial ["replicate"]>>
  fsdp.return %loss : tensor<f32>
}

// -----

// One replica: nothing to do.

// CHECK:     fsdp.reduce_scatter
// CHECK-NOT: fsdp.all_reduce
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4x4xf32> unit @u sharding <@world, [{"shard"}, {}]>
fsdp.program @train_step(%x: tensor<4x4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4x4xf32>) -> tensor<f32>
  fsdp.phase backward
  %g = aten.call "aten::mm"(%x, %x) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %r = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4x4xf32>) -> !fsdp.sharded<tensor<4x4xf32>, <@world, [{"shard"}, {}]>>
  fsdp.gradients [@w] %r : !fsdp.sharded<tensor<4x4xf32>, <@world, [{"shard"}, {}]>>
  fsdp.return %loss : tensor<f32>
}

// -----

// One replica, all-reduced in the last microbatch: FSDP2 adds the shards in
// reduce_dtype.

// CHECK:      %[[R:.*]] = fsdp.reduce_scatter @u avg [@w] %{{.*}} {reduce_dtype = bf16} : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xbf16>, <@world, [{"shard"}], partial ["replicate"]>>
// CHECK-NEXT: fsdp.all_reduce @u avg over "replicate" [@w] %[[R]] {reduce_dtype = bf16}
fsdp.mesh @world <["replicate"=1, "shard"=2]>
fsdp.accumulation {all_reduce_each_microbatch = false, reduce_each_microbatch = true, steps = 2}
fsdp.unit @u {mixed_precision = #fsdp.mixed_precision<reduce_dtype = bf16>}
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %r = fsdp.reduce_scatter @u avg [@w] %x {reduce_dtype = bf16} : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xbf16>, <@world, [{"shard"}], partial ["replicate"]>>
  fsdp.gradients [@w] %r : !fsdp.sharded<tensor<4xbf16>, <@world, [{"shard"}], partial ["replicate"]>>
  fsdp.return %loss : tensor<f32>
}

// -----

// Mixed precision: both reductions are in reduce_dtype; the division after a sum
// and the cast to the parameter's dtype come last.

// CHECK:      %[[R:.*]] = fsdp.reduce_scatter @u sum [@w] %{{.*}} {predivide = 2.000000e+00 : f64, reduce_dtype = f16} : (tensor<4x4xbf16>) -> !fsdp.sharded<tensor<4x4xf16>, <@world, [{"shard"}, {}], partial ["replicate"]>>
// CHECK-NEXT: %[[A:.*]] = fsdp.all_reduce @u sum over "replicate" [@w] %[[R]] {postdivide = 2.000000e+00 : f64, reduce_dtype = f16} : (!fsdp.sharded<tensor<4x4xf16>, <@world, [{"shard"}, {}], partial ["replicate"]>>) -> !fsdp.sharded<tensor<4x4xf32>, <@world, [{"shard"}, {}]>>
// CHECK-NEXT: fsdp.gradients [@w] %[[A]]
fsdp.mesh @world <["replicate"=2, "shard"=2]>
fsdp.unit @u {mixed_precision = #fsdp.mixed_precision<param_dtype = bf16, reduce_dtype = f16>}
fsdp.param @w : tensor<4x4xf32> unit @u sharding <@world, [{"shard"}, {}]> {compute_dtype = bf16}
fsdp.program @train_step(%x: tensor<4x4xbf16>) -> tensor<bf16> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4x4xbf16>) -> tensor<bf16>
  fsdp.phase backward
  %g = aten.call "aten::mm"(%x, %x) : (tensor<4x4xbf16>, tensor<4x4xbf16>) -> tensor<4x4xbf16>
  %r = fsdp.reduce_scatter @u sum [@w] %g {reduce_dtype = f16, predivide = 2.0, postdivide = 2.0} : (tensor<4x4xbf16>) -> !fsdp.sharded<tensor<4x4xf16>, <@world, [{"shard"}, {}], partial ["replicate"]>>
  fsdp.gradients [@w] %r : !fsdp.sharded<tensor<4x4xf16>, <@world, [{"shard"}, {}], partial ["replicate"]>>
  fsdp.return %loss : tensor<bf16>
}
