// RUN: fsdp-opt %s | fsdp-opt | FileCheck %s
// RUN: fsdp-opt --mlir-print-op-generic %s | fsdp-opt | FileCheck %s

// Every op, type and attribute parses from its own print, in the pretty and in
// the generic form.

// CHECK: module attributes {fsdp.model = "Tiny"}
module attributes {fsdp.model = "Tiny"} {
  // CHECK: fsdp.mesh @world <["replicate"=2, "shard"=4]>
  fsdp.mesh @world <["replicate"=2, "shard"=4]>
  // CHECK: fsdp.optimizer "sgd" {lr = 1.000000e-01 : f64, momentum = 9.000000e-01 : f64, nesterov = true}
  fsdp.optimizer "sgd" {lr = 1.0e-1, momentum = 0.9, nesterov = true}
  // CHECK: fsdp.param_group "**.bias", "norm.weight" {weight_decay = 0.000000e+00 : f64}
  fsdp.param_group "**.bias", "norm.weight" {weight_decay = 0.0}
  // CHECK: fsdp.gradient_clipping {max_norm = 5.000000e-01 : f64, norm_type = 0x7FF0000000000000 : f64}
  fsdp.gradient_clipping {max_norm = 0.5, norm_type = 0x7FF0000000000000 : f64}
  // CHECK: fsdp.lr_schedule {decay = "cosine", min_lr_ratio = 1.000000e-01 : f64, total_steps = 9 : i64, warmup_steps = 2 : i64}
  fsdp.lr_schedule {decay = "cosine", min_lr_ratio = 0.1, total_steps = 9, warmup_steps = 2}
  // CHECK: fsdp.schedule {device = "h100", memory_budget = 68719476736 : i64, prefetch = "fsdp2"}
  fsdp.schedule {prefetch = "fsdp2", memory_budget = 68719476736 : i64, device = "h100"}
  // CHECK: fsdp.accumulation {all_reduce_each_microbatch = false, reduce_each_microbatch = false, reshard_after_backward = false, steps = 4 : i64}
  fsdp.accumulation {all_reduce_each_microbatch = false, reduce_each_microbatch = false, reshard_after_backward = false, steps = 4}
  // CHECK: fsdp.unit_pattern "h.*" {gradient_division = #fsdp.gradient_division<factor = 8.000000e+00 : f64>}
  fsdp.unit_pattern "h.*" {gradient_division = #fsdp.gradient_division<factor = 8.0 : f64>}
  // CHECK: fsdp.unit @summed {gradient_division = #fsdp.gradient_division<force_sum = true>}
  fsdp.unit @summed {gradient_division = #fsdp.gradient_division<force_sum = true>}
  // CHECK: fsdp.grad_scaler {backoff_factor = 5.000000e-01 : f64, growth_factor = 2.000000e+00 : f64, growth_interval = 2000 : i64, init_scale = 6.553600e+04 : f64}
  fsdp.grad_scaler {backoff_factor = 0.5, growth_factor = 2.0, growth_interval = 2000, init_scale = 65536.0}
  // CHECK: fsdp.unit_pattern "layers.**" {reshard_after_forward = false}
  fsdp.unit_pattern "layers.**" {reshard_after_forward = false}
  // CHECK: fsdp.checkpoint_pattern "layers.*" {save = ["aten::mm"]}
  fsdp.checkpoint_pattern "layers.*" {save = ["aten::mm"]}
  // CHECK: fsdp.unit_pattern "" {mixed_precision = #fsdp.mixed_precision<param_dtype = f16, output_dtype = f64, cast_forward_inputs = false>}
  fsdp.unit_pattern "" {mixed_precision = #fsdp.mixed_precision<param_dtype = f16, output_dtype = f64, cast_forward_inputs = false>}
  // CHECK: fsdp.unit @mixed {mixed_precision = #fsdp.mixed_precision<param_dtype = bf16, reduce_dtype = f32>}
  fsdp.unit @mixed {mixed_precision = #fsdp.mixed_precision<param_dtype = bf16, reduce_dtype = f32>}
  // CHECK: fsdp.param @m : tensor<4xf32> unit @mixed sharding <@world, [{"shard"}]> {compute_dtype = bf16}
  fsdp.param @m : tensor<4xf32> unit @mixed sharding <@world, [{"shard"}]> {compute_dtype = bf16}
  // CHECK: fsdp.unit @"(root)" {reshard_after_forward = false}
  fsdp.unit @"(root)" {reshard_after_forward = false}
  // CHECK: fsdp.param @w : tensor<4x2xf32> unit @"(root)" sharding <@world, [{"shard"}, {}]> {aliases = ["head.w"]}
  fsdp.param @w : tensor<4x2xf32> unit @"(root)" sharding <@world, [{"shard"}, {}]> {aliases = ["head.w"]}
  // CHECK: fsdp.unit_pattern "norm", "output" {reshard_after_forward = false}
  fsdp.unit_pattern "norm", "output" {reshard_after_forward = false}
  // CHECK: fsdp.unit_pattern "Block" {by_class}
  fsdp.unit_pattern "Block" {by_class}
  // CHECK: fsdp.unit_pattern "experts.*" {post_forward_size = 2 : i64}
  fsdp.unit_pattern "experts.*" {post_forward_size = 2}
  // CHECK: fsdp.unit @experts {post_forward_size = 2 : i64}
  fsdp.unit @experts {post_forward_size = 2}
  // CHECK: fsdp.param @e : tensor<4xf32> unit @experts
  fsdp.param @e : tensor<4xf32> unit @experts sharding <@world, [{"shard"}]>
  // CHECK: fsdp.shard_placement "**.wo" {dim = -1 : i64}
  fsdp.shard_placement "**.wo" {dim = -1}
  // CHECK: fsdp.auto_units
  fsdp.auto_units
  // CHECK: fsdp.ignore "**.router"
  fsdp.ignore "**.router"
  // CHECK: fsdp.param @scale : tensor<f32> {ignored}
  fsdp.param @scale : tensor<f32> {ignored}
  // CHECK: fsdp.param @frozen : tensor<3xbf16> {frozen}
  fsdp.param @frozen : tensor<3xbf16> {frozen}
  // CHECK: fsdp.buffer @mask : tensor<2xi1> {non_persistent}
  fsdp.buffer @mask : tensor<2xi1> {non_persistent}
  // CHECK: fsdp.buffer @rope : tensor<8x4xcomplex<f32>> {strides = array<i64: 1, 8>}
  fsdp.buffer @rope : tensor<8x4xcomplex<f32>> {strides = array<i64: 1, 8>}

  // CHECK-LABEL: fsdp.program @train_step
  // CHECK-SAME:    (%[[X:.*]]: tensor<4x2xf32> {fsdp.name = "x", fsdp.strides = array<i64: 1, 4>}) -> tensor<f32>
  fsdp.program @train_step(%x: tensor<4x2xf32> {fsdp.name = "x", fsdp.strides = array<i64: 1, 4>}) -> tensor<f32> {
    // CHECK: fsdp.phase forward
    fsdp.phase forward
    // CHECK: fsdp.read_buffer @mask : tensor<2xi1>
    %mask = fsdp.read_buffer @mask : tensor<2xi1>
    // CHECK: %[[S:.*]] = fsdp.read @w : !fsdp.sharded<tensor<4x2xf32>, <@world, [{"shard"}, {}]>>
    %s = fsdp.read @w : !fsdp.sharded<tensor<4x2xf32>, <@world, [{"shard"}, {}]>>
    // CHECK: %[[W:.*]] = fsdp.all_gather @"(root)" %[[S]] : (!fsdp.sharded<tensor<4x2xf32>, <@world, [{"shard"}, {}]>>) -> tensor<4x2xf32>
    %w = fsdp.all_gather @"(root)" %s : (!fsdp.sharded<tensor<4x2xf32>, <@world, [{"shard"}, {}]>>) -> tensor<4x2xf32>
    // Parts of parameters over a sub-axis.
    // CHECK: %[[E:.*]] = fsdp.read @e
    %e = fsdp.read @e : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
    // CHECK: %[[EW:.*]] = fsdp.all_gather @experts %[[E]] : (
    %ew = fsdp.all_gather @experts %e : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
    // CHECK: %[[K:.*]] = fsdp.reshard @experts %[[EW]] : tensor<4xf32> to !fsdp.sharded<tensor<4xf32>, <@world, [{"shard":2}]>>
    %k = fsdp.reshard @experts %ew : tensor<4xf32> to !fsdp.sharded<tensor<4xf32>, <@world, [{"shard":2}]>>
    // CHECK: %[[KW:.*]] = fsdp.all_gather @experts %[[K]] : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard":2}]>>) -> tensor<4xf32>
    %kw = fsdp.all_gather @experts %k : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard":2}]>>) -> tensor<4xf32>
    // CHECK: fsdp.reshard @experts %[[KW]] : tensor<4xf32>{{$}}
    fsdp.reshard @experts %kw : tensor<4xf32>
    // Lists of operands, absent optionals, numbers that decimals cannot hold.
    // CHECK: aten.call "aten::cat"([%[[X]], %[[W]]], 0)
    %c = aten.call "aten::cat"([%x, %w], 0) : (tensor<4x2xf32>, tensor<4x2xf32>) -> tensor<8x2xf32>
    // CHECK: aten.call "aten::index.Tensor"(%{{.*}}, [none, %{{.*}}])
    %i = aten.call "aten::index.Tensor"(%c, [none, %mask]) : (tensor<8x2xf32>, tensor<2xi1>) -> tensor<8x2xf32>
    // CHECK: aten.call "aten::full"([2, 3], 0xFFF0000000000000 : f64, 6, none, device, false)
    %f = aten.call "aten::full"([2, 3], 0xFFF0000000000000 : f64, 6, none, device, false) : () -> tensor<2x3xf32>
    // CHECK: aten.call "aten::bernoulli_.float"(%{{.*}}, 9.000000e-01, none) {mutates = array<i64: 0>, random, views = array<i64: 0>}
    %r = aten.call "aten::bernoulli_.float"(%f, 0.9, none) {mutates = array<i64: 0>, random, views = array<i64: 0>} : (tensor<2x3xf32>) -> tensor<2x3xf32>
    // CHECK: aten.call "aten::mul.Scalar"(%{{.*}}, #aten.complex<0.000000e+00 : f64, 0x7FF0000000000000 : f64>) {strides = [array<i64: 1, 2>]} : (tensor<2x3xf32>) -> tensor<2x3xcomplex<f32>>
    %j = aten.call "aten::mul.Scalar"(%r, #aten.complex<0.0 : f64, 0x7FF0000000000000 : f64>) {strides = [array<i64: 1, 2>]} : (tensor<2x3xf32>) -> tensor<2x3xcomplex<f32>>
    // CHECK: aten.call "aten::gelu"(%{{.*}}, "tanh")
    %g = aten.call "aten::gelu"(%r, "tanh") : (tensor<2x3xf32>) -> tensor<2x3xf32>
    // CHECK: aten.call "aten::relu"(%{{.*}}) {recompute}
    %again = aten.call "aten::relu"(%r) {recompute} : (tensor<2x3xf32>) -> tensor<2x3xf32>
    // CHECK: aten.call "test::nullary"(void)
    %n = aten.call "test::nullary"(void) : () -> tensor<f32>
    // CHECK: fsdp.reshard @"(root)" %[[W]] : tensor<4x2xf32>
    fsdp.reshard @"(root)" %w : tensor<4x2xf32>
    // CHECK: fsdp.phase backward
    fsdp.phase backward
    // CHECK: fsdp.loss_scale : tensor<f32>
    %scale = fsdp.loss_scale : tensor<f32>
    // CHECK: %[[D:.*]] = fsdp.reduce_scatter @"(root)" avg [@w] %[[X]] :
    %d = fsdp.reduce_scatter @"(root)" avg [@w] %x : (tensor<4x2xf32>) -> !fsdp.sharded<tensor<4x2xf32>, <@world, [{"shard"}, {}], partial ["replicate"]>>
    // CHECK: fsdp.all_gather @mixed %{{.*}} : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xbf16>
    %ms = fsdp.read @m : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
    %m = fsdp.all_gather @mixed %ms : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xbf16>
    %mg = aten.call "aten::neg"(%m) : (tensor<4xbf16>) -> tensor<4xbf16>
    fsdp.reshard @mixed %m : tensor<4xbf16>
    // CHECK: fsdp.reduce_scatter @mixed sum [@m] %{{.*}} {postdivide = 2.000000e+00 : f64, predivide = 4.000000e+00 : f64, reduce_dtype = f32} : (tensor<4xbf16>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>
    %md = fsdp.reduce_scatter @mixed sum [@m] %mg {reduce_dtype = f32, predivide = 4.0, postdivide = 2.0} : (tensor<4xbf16>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>
    // CHECK: %[[F:.*]] = fsdp.all_gather @mixed %{{.*}} : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.future<tensor<4xbf16>>
    %future = fsdp.all_gather @mixed %ms : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.future<tensor<4xbf16>>
    // CHECK-NEXT: fsdp.wait %[[F]] : !fsdp.future<tensor<4xbf16>>
    %come = fsdp.wait %future : !fsdp.future<tensor<4xbf16>>
    fsdp.reshard @mixed %come : tensor<4xbf16>
    // CHECK: %[[A:.*]] = fsdp.all_reduce @"(root)" avg over "replicate" [@w] %[[D]] : (!fsdp.sharded<tensor<4x2xf32>, <@world, [{"shard"}, {}], partial ["replicate"]>>) -> !fsdp.sharded<tensor<4x2xf32>, <@world, [{"shard"}, {}]>>
    %a = fsdp.all_reduce @"(root)" avg over "replicate" [@w] %d : (!fsdp.sharded<tensor<4x2xf32>, <@world, [{"shard"}, {}], partial ["replicate"]>>) -> !fsdp.sharded<tensor<4x2xf32>, <@world, [{"shard"}, {}]>>
    // CHECK: fsdp.phase optimizer
    fsdp.phase optimizer
    // CHECK: %[[U:.*]] = fsdp.unscale [@w] %[[A]] {deferred} : (!fsdp.sharded<
    %unscaled = fsdp.unscale [@w] %a {deferred} : (!fsdp.sharded<tensor<4x2xf32>, <@world, [{"shard"}, {}]>>) -> !fsdp.sharded<tensor<4x2xf32>, <@world, [{"shard"}, {}]>>
    // CHECK: %[[C:.*]] = fsdp.clip_grad_norm [@w] %[[U]] {max_norm = 5.000000e-01 : f64, norm_type = 2.000000e+00 : f64}
    %clipped = fsdp.clip_grad_norm [@w] %unscaled {max_norm = 0.5, norm_type = 2.0} : (!fsdp.sharded<tensor<4x2xf32>, <@world, [{"shard"}, {}]>>) -> !fsdp.sharded<tensor<4x2xf32>, <@world, [{"shard"}, {}]>>
    // CHECK: fsdp.optimizer_step [@w] %[[C]] {groups = array<i64: 1>} : !fsdp.sharded<
    fsdp.optimizer_step [@w] %clipped {groups = array<i64: 1>} : !fsdp.sharded<tensor<4x2xf32>, <@world, [{"shard"}, {}]>>
    // CHECK: fsdp.free %[[X]] : tensor<4x2xf32>
    fsdp.free %x : tensor<4x2xf32>
    // CHECK: fsdp.no_gradient [@e, @scale]
    fsdp.no_gradient [@e, @scale]
    // CHECK: fsdp.gradients [@m] %{{.*}} : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>
    fsdp.gradients [@m] %md : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>
    // CHECK: fsdp.return %{{.*}} : tensor<f32>
    fsdp.return %n : tensor<f32>
  }

  // CHECK: fsdp.offload_pattern "layers.*" {min_bytes = 4096 : i64}
  fsdp.offload_pattern "layers.*" {min_bytes = 4096 : i64}
  // CHECK-LABEL: fsdp.program @offloaded
  fsdp.program @offloaded(%x: tensor<4xf32>) -> tensor<f32> {
    %a = aten.call "aten::exp"(%x) : (tensor<4xf32>) -> tensor<4xf32>
    %v = aten.call "aten::view"(%a, [2, 2]) {views = array<i64: 0>} : (tensor<4xf32>) -> tensor<2x2xf32>
    // CHECK: %[[H:.*]] = fsdp.offload_activation %{{.*}}, %{{.*}} : tensor<4xf32>, tensor<2x2xf32> to !fsdp.host<tensor<4xf32>, tensor<2x2xf32>>
    %h = fsdp.offload_activation %a, %v : tensor<4xf32>, tensor<2x2xf32> to !fsdp.host<tensor<4xf32>, tensor<2x2xf32>>
    // CHECK-NEXT: %{{.*}}:2 = fsdp.reload_activation %[[H]] : !fsdp.host<tensor<4xf32>, tensor<2x2xf32>> to tensor<4xf32>, tensor<2x2xf32>
    %b, %w = fsdp.reload_activation %h : !fsdp.host<tensor<4xf32>, tensor<2x2xf32>> to tensor<4xf32>, tensor<2x2xf32>
    %e = aten.call "aten::exp"(%b) : (tensor<4xf32>) -> tensor<4xf32>
    // CHECK: %[[F:.*]] = fsdp.offload_activation %{{.*}} : tensor<4xf32> to !fsdp.future<!fsdp.host<tensor<4xf32>>>
    %f = fsdp.offload_activation %e : tensor<4xf32> to !fsdp.future<!fsdp.host<tensor<4xf32>>>
    // CHECK-NEXT: %[[K:.*]] = fsdp.wait %[[F]] : !fsdp.future<!fsdp.host<tensor<4xf32>>>
    %k = fsdp.wait %f : !fsdp.future<!fsdp.host<tensor<4xf32>>>
    // CHECK-NEXT: %[[G:.*]] = fsdp.reload_activation %[[K]] : !fsdp.host<tensor<4xf32>> to !fsdp.future<tensor<4xf32>>
    %g = fsdp.reload_activation %k : !fsdp.host<tensor<4xf32>> to !fsdp.future<tensor<4xf32>>
    // CHECK-NEXT: fsdp.wait %[[G]] : !fsdp.future<tensor<4xf32>>
    %c = fsdp.wait %g : !fsdp.future<tensor<4xf32>>
    %n = aten.call "aten::sum"(%c, none) : (tensor<4xf32>) -> tensor<f32>
    fsdp.return %n : tensor<f32>
  }

  // CHECK-LABEL: fsdp.program @init() {
  fsdp.program @init() {
    // CHECK: %[[V:.*]] = aten.call "aten::zeros"
    %v = aten.call "aten::zeros"([4, 2], 6, none, device, none) : () -> tensor<4x2xf32>
    // CHECK: fsdp.write_param @w, %[[V]] : tensor<4x2xf32>
    fsdp.write_param @w, %v : tensor<4x2xf32>
    %b = aten.call "aten::zeros"([2], 11, none, device, none) : () -> tensor<2xi1>
    // CHECK: fsdp.write_buffer @mask, %{{.*}} : tensor<2xi1>
    fsdp.write_buffer @mask, %b : tensor<2xi1>
    // CHECK: fsdp.return{{$}}
    fsdp.return
  }
}
