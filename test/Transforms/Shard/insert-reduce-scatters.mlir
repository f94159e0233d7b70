// RUN: fsdp-opt --fsdp-insert-reduce-scatters --split-input-file %s | FileCheck %s

// One reduction a unit after the last of its gradients, in unit order although
// backward wrote the bias first; a parameter without gradient takes no part.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[GB:.*]] = aten.call "aten::relu"
// CHECK-NEXT:    %[[GW:.*]] = aten.call "aten::mm"
// CHECK-NEXT:    %[[R:.*]]:2 = fsdp.reduce_scatter @u avg [@w, @b] %[[GW]], %[[GB]] : (tensor<4x4xf32>, tensor<4xf32>) -> (!fsdp.sharded<tensor<4x4xf32>, <@world, [{"shard"}, {}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>)
// CHECK-NEXT:    fsdp.gradients [@w, @b] %[[R]]#0, %[[R]]#1
// CHECK-NEXT:    fsdp.return
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4x4xf32> unit @u sharding <@world, [{"shard"}, {}]>
fsdp.param @frozen : tensor<4xf32> unit @u sharding <@world, [{"shard"}]> {frozen}
fsdp.param @b : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4x4xf32>, %y: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4x4xf32>) -> tensor<f32>
  fsdp.phase backward
  %gb = aten.call "aten::relu"(%y) : (tensor<4xf32>) -> tensor<4xf32>
  %gw = aten.call "aten::mm"(%x, %x) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  fsdp.gradients [@w, @b] %gw, %gb : tensor<4x4xf32>, tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// The op that gives the gradients of two units is the last use of a parameter:
// it is resharded before the reductions, which are in the order of the units.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         fsdp.phase backward
// CHECK:         aten.call "test::both_grads"
// CHECK-NEXT:    fsdp.reshard @u
// CHECK-NEXT:    fsdp.reduce_scatter @u avg [@w]
// CHECK-NEXT:    fsdp.reduce_scatter @v avg [@b]
// CHECK-NEXT:    fsdp.gradients [@w, @b]
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.unit @v
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @b : tensor<4xf32> unit @v sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %w = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  %g:2 = aten.call "test::both_grads"(%x, %w) : (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
  fsdp.reshard @u %w : tensor<4xf32>
  fsdp.gradients [@w, @b] %g#0, %g#1 : tensor<4xf32>, tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// A unit that is called twice, the first time with one of its parameters alone:
// behind the second call, where backward begins, the other one is reduced.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         aten.call "aten::sin"
// CHECK-NEXT:    fsdp.reduce_scatter @u avg [@w]
// CHECK-NEXT:    aten.call "aten::cos"
// CHECK-NEXT:    fsdp.reduce_scatter @u avg [@b]
// CHECK-NEXT:    fsdp.gradients [@b, @w]
fsdp.mesh @world <["shard"=3]>
fsdp.unit @u
fsdp.param @b : tensor<4xf32> unit @u sharding <@world, [{"shard"}]> {post_backward = 1 : i64}
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %gw = aten.call "aten::sin"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %gb = aten.call "aten::cos"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  fsdp.gradients [@b, @w] %gb, %gw : tensor<4xf32>, tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// Twelve ranks average fp16 gradients by 4 before the sum and 3 after it, as
// FSDP2 does; without a reduce_dtype a unit reduces in its parameters' own.

// CHECK-LABEL: fsdp.program @train_step
// CHECK: fsdp.reduce_scatter @half sum [@h] %{{.*}} {postdivide = 3.000000e+00 : f64, predivide = 4.000000e+00 : f64, reduce_dtype = f16}
// CHECK: fsdp.reduce_scatter @mixed avg [@m] %{{.*}} {reduce_dtype = f32}
fsdp.mesh @world <["shard"=12]>
fsdp.unit @half {mixed_precision = #fsdp.mixed_precision<param_dtype = f16, reduce_dtype = f16>}
fsdp.unit @mixed {mixed_precision = #fsdp.mixed_precision<param_dtype = f16>}
fsdp.param @h : tensor<4xf32> unit @half sharding <@world, [{"shard"}]> {compute_dtype = f16}
fsdp.param @m : tensor<4xf32> unit @mixed sharding <@world, [{"shard"}]> {compute_dtype = f16, grad_dtype = f32}
fsdp.program @train_step(%x: tensor<4xf16>, %y: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, 6) : (tensor<4xf16>) -> tensor<f32>
  fsdp.phase backward
  fsdp.gradients [@h, @m] %x, %y : tensor<4xf16>, tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// FSDP2 before PyTorch 2.15 reduces in the gradients' dtype.

// CHECK-LABEL: fsdp.program @train_step
// CHECK: fsdp.reduce_scatter @wide avg [@h] %{{.*}} {reduce_dtype = f32}
// CHECK: fsdp.reduce_scatter @own avg [@m] %{{.*}} {reduce_dtype = bf16}
module attributes {fsdp.captured_for = {device = "cpu", torch = "2.14.1"}} {
  fsdp.mesh @world <["shard"=2]>
  fsdp.unit @wide {mixed_precision = #fsdp.mixed_precision<param_dtype = bf16, reduce_dtype = f32>}
  fsdp.unit @own {mixed_precision = #fsdp.mixed_precision<param_dtype = bf16>}
  fsdp.param @h : tensor<4xf32> unit @wide sharding <@world, [{"shard"}]> {compute_dtype = bf16}
  fsdp.param @m : tensor<4xf32> unit @own sharding <@world, [{"shard"}]> {compute_dtype = bf16}
  fsdp.program @train_step(%x: tensor<4xbf16>) -> tensor<f32> {
    fsdp.phase forward
    %loss = aten.call "aten::sum"(%x, 6) : (tensor<4xbf16>) -> tensor<f32>
    fsdp.phase backward
    fsdp.gradients [@h, @m] %x, %x : tensor<4xbf16>, tensor<4xbf16>
    fsdp.return %loss : tensor<f32>
  }
}

// -----

// Parameters that are fp16 themselves are reduced in fp16 too.

// CHECK: fsdp.reduce_scatter @u sum [@w] %{{.*}} {postdivide = 2.000000e+00 : f64, predivide = 4.000000e+00 : f64} : (tensor<4xf16>)
fsdp.mesh @world <["shard"=8]>
fsdp.unit @u
fsdp.param @w : tensor<4xf16> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf16>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, 6) : (tensor<4xf16>) -> tensor<f32>
  fsdp.phase backward
  fsdp.gradients [@w] %x : tensor<4xf16>
  fsdp.return %loss : tensor<f32>
}
