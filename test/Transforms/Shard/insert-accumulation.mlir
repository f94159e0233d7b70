// RUN: fsdp-opt --fsdp-insert-accumulation --split-input-file --verify-diagnostics %s | FileCheck %s

// FSDP2's default: every microbatch reduces, the shards are added.

// CHECK-LABEL: fsdp.program @train_step(%arg0: tensor<4xf32>)
// CHECK-NEXT:    %[[LOSS:.*]], %[[GRAD:.*]] = fsdp.microbatches 4(%arg0) : (tensor<4xf32>) -> (tensor<f32>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) {
// CHECK-NEXT:    ^bb0(%[[X:.*]]: tensor<4xf32>, %first: i1, %last: i1, %[[BEFORE:.*]]: !fsdp.carried<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>):
// CHECK-NEXT:      fsdp.phase forward
// CHECK-NEXT:      %[[L:.*]] = aten.call "aten::sum"(%[[X]], none)
// CHECK-NEXT:      fsdp.phase backward
// CHECK-NEXT:      %[[ONE:.*]] = aten.call "aten::ones_like"
// CHECK-NEXT:      %[[SEED:.*]] = aten.call "aten::div.Scalar"(%[[ONE]], 4) : (tensor<f32>) -> tensor<f32>
// CHECK-NEXT:      %[[G:.*]] = aten.call "aten::mul.Tensor"(%[[X]], %[[SEED]])
// CHECK-NEXT:      %[[R:.*]] = fsdp.reduce_scatter @u avg [@w] %[[G]] :
// CHECK-NEXT:      %[[SUM:.*]] = fsdp.accumulate [@w] %[[R]] onto %[[BEFORE]] : !fsdp.carried<{{.*}} : (!fsdp.sharded<
// CHECK-NEXT:      fsdp.yield %[[L]], %[[SUM]] : tensor<f32>, !fsdp.sharded<{{.*}}> carry %[[SUM]] : !fsdp.sharded<
// CHECK:         fsdp.gradients [@w] %[[GRAD]]
// CHECK-NEXT:    fsdp.return %[[LOSS]]
fsdp.mesh @world <["shard"=2]>
fsdp.accumulation {reduce_each_microbatch = true, steps = 4}
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%loss, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
  %g = aten.call "aten::mul.Tensor"(%x, %one) : (tensor<4xf32>, tensor<f32>) -> tensor<4xf32>
  %r = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.gradients [@w] %r : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}

// -----

// Whole gradients are added; the last microbatch reduces the sums.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:           aten.call "aten::div.Scalar"
// CHECK-NEXT:      %[[G:.*]] = aten.call "aten::mul.Tensor"
// CHECK-NEXT:      %[[SUM:.*]] = fsdp.accumulate [@w] %[[G]] onto %{{.*}} : !fsdp.carried<tensor<4xf32>> : (tensor<4xf32>) -> tensor<4xf32>
// CHECK-NEXT:      %[[R:.*]] = fsdp.reduce_scatter @u avg [@w] %[[SUM]] when %last :
// CHECK-NEXT:      fsdp.yield %{{.*}}, %[[R]] : {{.*}} carry %[[SUM]] : tensor<4xf32>
fsdp.mesh @world <["shard"=2]>
fsdp.accumulation {reduce_each_microbatch = false, steps = 4}
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%loss, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
  %g = aten.call "aten::mul.Tensor"(%x, %one) : (tensor<4xf32>, tensor<f32>) -> tensor<4xf32>
  %r = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.gradients [@w] %r : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}

// -----

// Mixed precision: whole gradients are added in reduce_dtype; HSDP's all-reduce
// runs in the last microbatch too.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[G:.*]] = aten.call "aten::mul.Tensor"{{.*}} -> tensor<4xbf16>
// CHECK-NEXT:    %[[SUM:.*]] = fsdp.accumulate [@w] %[[G]] onto %{{.*}} : !fsdp.carried<tensor<4xf16>> : (tensor<4xbf16>) -> tensor<4xf16>
// CHECK-NEXT:    %[[R:.*]] = fsdp.reduce_scatter @u avg [@w] %[[SUM]] when %last {reduce_dtype = f16} : (tensor<4xf16>)
// CHECK-NEXT:    %[[A:.*]] = fsdp.all_reduce @u avg over "replicate" [@w] %[[R]] when %last {reduce_dtype = f16}
// CHECK-NEXT:    fsdp.yield %{{.*}}, %[[A]] :
fsdp.mesh @world <["replicate"=2, "shard"=2]>
fsdp.accumulation {reduce_each_microbatch = false, steps = 4}
fsdp.unit @u {mixed_precision = #fsdp.mixed_precision<param_dtype = bf16, reduce_dtype = f16>}
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]> {compute_dtype = bf16}
fsdp.program @train_step(%x: tensor<4xbf16>) -> tensor<bf16> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xbf16>) -> tensor<bf16>
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%loss, none, none, none, false, 1) : (tensor<bf16>) -> tensor<bf16>
  %g = aten.call "aten::mul.Tensor"(%x, %one) : (tensor<4xbf16>, tensor<bf16>) -> tensor<4xbf16>
  %r = fsdp.reduce_scatter @u avg [@w] %g {reduce_dtype = f16} : (tensor<4xbf16>) -> !fsdp.sharded<tensor<4xf16>, <@world, [{"shard"}], partial ["replicate"]>>
  %a = fsdp.all_reduce @u avg over "replicate" [@w] %r {reduce_dtype = f16} : (!fsdp.sharded<tensor<4xf16>, <@world, [{"shard"}], partial ["replicate"]>>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.gradients [@w] %a : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<bf16>
}

// -----

// FSDP2 before PyTorch 2.15 adds in the gradients' dtype.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[SUM:.*]] = fsdp.accumulate [@w] {{.*}} : (tensor<4xbf16>) -> tensor<4xbf16>
// CHECK-NEXT:    fsdp.reduce_scatter @u avg [@w] %[[SUM]] when %last {reduce_dtype = bf16}
module attributes {fsdp.captured_for = {device = "cpu", torch = "2.11.0"}} {
  fsdp.mesh @world <["shard"=2]>
  fsdp.accumulation {reduce_each_microbatch = false, steps = 4}
  fsdp.unit @u {mixed_precision = #fsdp.mixed_precision<param_dtype = bf16>}
  fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]> {compute_dtype = bf16}
  fsdp.program @train_step(%x: tensor<4xbf16>) -> tensor<bf16> {
    fsdp.phase forward
    %loss = aten.call "aten::sum"(%x, none) : (tensor<4xbf16>) -> tensor<bf16>
    fsdp.phase backward
    %one = aten.call "aten::ones_like"(%loss, none, none, none, false, 1) : (tensor<bf16>) -> tensor<bf16>
    %g = aten.call "aten::mul.Tensor"(%x, %one) : (tensor<4xbf16>, tensor<bf16>) -> tensor<4xbf16>
    %r = fsdp.reduce_scatter @u avg [@w] %g {reduce_dtype = bf16} : (tensor<4xbf16>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
    fsdp.gradients [@w] %r : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
    fsdp.return %loss : tensor<bf16>
  }
}

// -----

// HSDP: every microbatch reduce-scatters; the sums of all units, in reduce_dtype,
// are all-reduced in the last one, and copied to the host after that.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[RU:.*]] = fsdp.reduce_scatter @u avg [@w]
// CHECK-NEXT:    %[[RV:.*]] = fsdp.reduce_scatter @v avg [@v.w]
// CHECK-NEXT:    %[[SUMS:.*]]:2 = fsdp.accumulate [@w, @v.w] %[[RU]], %[[RV]] onto {{.*}} : (!fsdp.sharded<tensor<4xf16>, <@world, [{"shard"}], partial ["replicate"]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>) -> (!fsdp.sharded<tensor<4xf16>, <@world, [{"shard"}], partial ["replicate"]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>)
// CHECK-NEXT:    %[[AU:.*]] = fsdp.all_reduce @u avg over "replicate" [@w] %[[SUMS]]#0 when %last {reduce_dtype = f16}
// CHECK-NEXT:    %[[AV:.*]] = fsdp.all_reduce @v avg over "replicate" [@v.w] %[[SUMS]]#1 when %last :
// CHECK-NEXT:    %[[C:.*]] = fsdp.copy_to_host @v [@v.w] %[[AV]] when %last :
// CHECK-NEXT:    fsdp.yield %{{.*}}, %[[AU]], %[[C]] : {{.*}} carry %[[SUMS]]#0, %[[SUMS]]#1 :
fsdp.mesh @world <["replicate"=2, "shard"=2]>
fsdp.accumulation {all_reduce_each_microbatch = false, reduce_each_microbatch = true, steps = 4}
fsdp.unit @u {mixed_precision = #fsdp.mixed_precision<reduce_dtype = f16>}
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.unit @v {cpu_offload}
fsdp.param @v.w : tensor<4xf32> unit @v sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%loss, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
  %g = aten.call "aten::mul.Tensor"(%x, %one) : (tensor<4xf32>, tensor<f32>) -> tensor<4xf32>
  %ru = fsdp.reduce_scatter @u avg [@w] %g {reduce_dtype = f16} : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf16>, <@world, [{"shard"}], partial ["replicate"]>>
  %au = fsdp.all_reduce @u avg over "replicate" [@w] %ru {reduce_dtype = f16} : (!fsdp.sharded<tensor<4xf16>, <@world, [{"shard"}], partial ["replicate"]>>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %rv = fsdp.reduce_scatter @v avg [@v.w] %g : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>
  %av = fsdp.all_reduce @v avg over "replicate" [@v.w] %rv : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %c = fsdp.copy_to_host @v [@v.w] %av : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.gradients [@w, @v.w] %au, %c : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}

// -----

// The gradient of an ignored parameter is added on each rank, here beside the
// shards.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[G:.*]] = aten.call "aten::mul.Tensor"
// CHECK-NEXT:    %[[R:.*]] = fsdp.reduce_scatter @u avg [@w] %[[G]] :
// CHECK-NEXT:    %[[SUMS:.*]]:2 = fsdp.accumulate [@w, @scale] %[[R]], %[[G]] onto {{.*}} : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, tensor<4xf32>)
// CHECK-NEXT:    fsdp.yield %{{.*}}, %[[SUMS]]#0, %[[SUMS]]#1 :
fsdp.mesh @world <["shard"=2]>
fsdp.accumulation {reduce_each_microbatch = true, steps = 4}
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @scale : tensor<4xf32> {ignored}
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%loss, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
  %g = aten.call "aten::mul.Tensor"(%x, %one) : (tensor<4xf32>, tensor<f32>) -> tensor<4xf32>
  %r = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.gradients [@w, @scale] %r, %g : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// Without reductions of each microbatch it is added where backward ends.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[G:.*]] = aten.call "aten::mul.Tensor"
// CHECK-NEXT:    %[[SUM:.*]] = fsdp.accumulate [@w] %[[G]] onto %[[B:.*]] : !fsdp.carried<tensor<4xf32>> : (tensor<4xf32>) -> tensor<4xf32>
// CHECK-NEXT:    %[[R:.*]] = fsdp.reduce_scatter @u avg [@w] %[[SUM]] when %last :
// CHECK-NEXT:    %[[OWN:.*]] = fsdp.accumulate [@scale] %[[G]] onto %{{.*}} : !fsdp.carried<tensor<4xf32>> : (tensor<4xf32>) -> tensor<4xf32>
// CHECK-NEXT:    fsdp.yield %{{.*}}, %[[R]], %[[OWN]] : {{.*}} carry %[[SUM]], %[[OWN]] :
fsdp.mesh @world <["shard"=2]>
fsdp.accumulation {reduce_each_microbatch = false, steps = 4}
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @scale : tensor<4xf32> {ignored}
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%loss, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
  %g = aten.call "aten::mul.Tensor"(%x, %one) : (tensor<4xf32>, tensor<f32>) -> tensor<4xf32>
  %r = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.gradients [@w, @scale] %r, %g : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// One microbatch is what there is without the policy.

// CHECK-LABEL: fsdp.program @train_step
// CHECK-NOT:     fsdp.microbatches
// CHECK-NOT:     aten::div
fsdp.mesh @world <["shard"=2]>
fsdp.accumulation {reduce_each_microbatch = true, steps = 1}
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%loss, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
  %g = aten.call "aten::mul.Tensor"(%x, %one) : (tensor<4xf32>, tensor<f32>) -> tensor<4xf32>
  %r = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.gradients [@w] %r : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}

// -----

// FSDP2 adds the two gradients of the first microbatch in f32.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         fsdp.accumulate [@once, @twice] {{.*}} : (tensor<4xbf16>, tensor<4xbf16>) -> (tensor<4xf32>, tensor<4xf32>)
fsdp.mesh @world <["shard"=2]>
fsdp.accumulation {reduce_each_microbatch = false, steps = 4}
fsdp.unit @u {mixed_precision = #fsdp.mixed_precision<param_dtype = bf16, reduce_dtype = f32>}
fsdp.param @once : tensor<4xf32> unit @u sharding <@world, [{"shard"}]> {compute_dtype = bf16}
// expected-warning @below {{used more than once: "twice": FSDP2 adds the gradients of its uses in 'f32' in the first microbatch, here in 'bf16'; the sums differ by rounding where "reduce_each_microbatch" is false}}
fsdp.param @twice : tensor<4xf32> unit @u sharding <@world, [{"shard"}]> {compute_dtype = bf16}
fsdp.program @train_step(%x: tensor<4xbf16>) -> tensor<bf16> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xbf16>) -> tensor<bf16>
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%loss, none, none, none, false, 1) : (tensor<bf16>) -> tensor<bf16>
  %g = aten.call "aten::mul.Tensor"(%x, %one) : (tensor<4xbf16>, tensor<bf16>) -> tensor<4xbf16>
  %h = aten.call "aten::add.Tensor"(%g, %g, 1) : (tensor<4xbf16>, tensor<4xbf16>) -> tensor<4xbf16>
  %r:2 = fsdp.reduce_scatter @u avg [@once, @twice] %g, %h {reduce_dtype = f32} : (tensor<4xbf16>, tensor<4xbf16>) -> (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>)
  fsdp.gradients [@once, @twice] %r#0, %r#1 : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<bf16>
}
