// RUN: fsdp-opt --fsdp-insert-all-gathers --split-input-file %s | FileCheck %s

// One gather brings all parameters of the unit, before the first use of any.

// CHECK-LABEL: fsdp.program @train_step
// CHECK-SAME:    (%[[X:.*]]: tensor<2x4xf32>)
// CHECK-NEXT:    fsdp.phase forward
// CHECK-NEXT:    %[[H:.*]] = aten.call "aten::relu"(%[[X]])
// CHECK-NEXT:    %[[S0:.*]] = fsdp.read @layer.weight : !fsdp.sharded<tensor<4x4xf32>, <@world, [{"shard"}, {}]>>
// CHECK-NEXT:    %[[S1:.*]] = fsdp.read @layer.bias : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
// CHECK-NEXT:    %[[W:.*]]:2 = fsdp.all_gather @layer %[[S0]], %[[S1]]
// CHECK-NEXT:    %[[T:.*]] = aten.call "aten::t"(%[[W]]#0)
// CHECK-NEXT:    aten.call "aten::addmm"(%[[W]]#1, %[[H]], %[[T]], 1, 1)
// CHECK-NOT:     fsdp.read
fsdp.mesh @world <["shard"=2]>
fsdp.unit @layer
fsdp.param @layer.weight : tensor<4x4xf32> unit @layer sharding <@world, [{"shard"}, {}]>
fsdp.param @layer.bias : tensor<4xf32> unit @layer sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<2x4xf32>) -> tensor<f32> {
  %w = fsdp.read @layer.weight : tensor<4x4xf32>
  %b = fsdp.read @layer.bias : tensor<4xf32>
  fsdp.phase forward
  %h = aten.call "aten::relu"(%x) : (tensor<2x4xf32>) -> tensor<2x4xf32>
  %t = aten.call "aten::t"(%w) {views = array<i64: 0>} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %y = aten.call "aten::addmm"(%b, %h, %t, 1, 1) : (tensor<4xf32>, tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  %loss = aten.call "aten::sum"(%y, none) : (tensor<2x4xf32>) -> tensor<f32>
  fsdp.return %loss : tensor<f32>
}

// -----

// A parameter that the step does not read is gathered with its unit, as FSDP2
// does; a unit that is not used at all is not gathered.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[USED:.*]] = fsdp.read @used
// CHECK-NEXT:    %[[UNUSED:.*]] = fsdp.read @unused
// CHECK-NEXT:    fsdp.all_gather @a %[[USED]], %[[UNUSED]]
// CHECK-NOT:     fsdp.all_gather
fsdp.mesh @world <["shard"=2]>
fsdp.unit @a
fsdp.unit @b
fsdp.param @used : tensor<4xf32> unit @a sharding <@world, [{"shard"}]>
fsdp.param @unused : tensor<4xf32> unit @a sharding <@world, [{"shard"}]>
fsdp.param @other : tensor<4xf32> unit @b sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  %w = fsdp.read @used : tensor<4xf32>
  fsdp.phase forward
  %loss = aten.call "aten::dot"(%x, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
  fsdp.return %loss : tensor<f32>
}

// -----

// A unit's parameters come in the dtype of its policy.

// CHECK: %[[S:.*]] = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
// CHECK: fsdp.all_gather @u %[[S]] : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xbf16>
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u {mixed_precision = #fsdp.mixed_precision<param_dtype = bf16>}
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]> {compute_dtype = bf16}
fsdp.program @train_step(%x: tensor<4xbf16>) -> tensor<bf16> {
  %w = fsdp.read @w : tensor<4xbf16>
  fsdp.phase forward
  %loss = aten.call "aten::dot"(%x, %w) : (tensor<4xbf16>, tensor<4xbf16>) -> tensor<bf16>
  fsdp.return %loss : tensor<bf16>
}
