// RUN: fsdp-opt --fsdp-pipeline %s | FileCheck %s

// An evaluation is sharded and lowered as the step is: each unit is gathered
// before its first use and resharded after its last, whatever
// reshard_after_forward says, and values end after their last use.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         fsdp.optimizer_step
// CHECK-LABEL: fsdp.program @evaluate
// CHECK-SAME:    (%[[X:.*]]: tensor<2x4xf32>) -> tensor<f32> attributes {evaluation}
// CHECK-NEXT:    %[[S:.*]] = fsdp.read @layer.w : !fsdp.sharded
// CHECK-NEXT:    %[[F:.*]] = fsdp.all_gather @layer %[[S]]
// CHECK-NEXT:    %[[W:.*]] = fsdp.wait %[[F]]
// CHECK-NEXT:    %[[Y:.*]] = aten.call "aten::mul.Tensor"(%[[X]], %[[W]])
// CHECK-NEXT:    fsdp.free %[[X]]
// CHECK-NEXT:    fsdp.reshard @layer %[[W]]
// CHECK-NEXT:    %[[SB:.*]] = fsdp.read @b
// CHECK-NEXT:    %[[G:.*]] = fsdp.all_gather @"(root)" %[[SB]]
// CHECK-NEXT:    %[[B:.*]] = fsdp.wait %[[G]]
// CHECK-NEXT:    %[[Z:.*]] = aten.call "aten::add.Tensor"(%[[Y]], %[[B]], 1)
// CHECK-NEXT:    fsdp.free %[[Y]]
// CHECK-NEXT:    fsdp.reshard @"(root)" %[[B]]
// CHECK-NEXT:    %[[L:.*]] = aten.call "aten::sum"(%[[Z]], none)
// CHECK-NEXT:    fsdp.free %[[Z]]
// CHECK-NEXT:    fsdp.return %[[L]]
fsdp.mesh @world <["shard"=2]>
fsdp.unit_pattern "layer"
fsdp.optimizer "sgd" {lr = 0.1}
fsdp.param @layer.w : tensor<4xf32>
fsdp.param @b : tensor<4xf32>
fsdp.program @train_step(%x: tensor<2x4xf32>) -> tensor<f32> {
  %w = fsdp.read @layer.w : tensor<4xf32>
  fsdp.phase forward
  %y = aten.call "aten::mul.Tensor"(%x, %w) : (tensor<2x4xf32>, tensor<4xf32>) -> tensor<2x4xf32>
  %l = aten.call "aten::sum"(%y, none) : (tensor<2x4xf32>) -> tensor<f32>
  fsdp.phase backward
  %g = aten.call "aten::sum.dim_IntList"(%x, [0], false, none) : (tensor<2x4xf32>) -> tensor<4xf32>
  fsdp.no_gradient [@b]
  fsdp.gradients [@layer.w] %g : tensor<4xf32>
  fsdp.return %l : tensor<f32>
}
fsdp.program @evaluate(%x: tensor<2x4xf32>) -> tensor<f32> attributes {evaluation} {
  %w = fsdp.read @layer.w : tensor<4xf32>
  %b = fsdp.read @b : tensor<4xf32>
  %y = aten.call "aten::mul.Tensor"(%x, %w) : (tensor<2x4xf32>, tensor<4xf32>) -> tensor<2x4xf32>
  %z = aten.call "aten::add.Tensor"(%y, %b, 1) : (tensor<2x4xf32>, tensor<4xf32>) -> tensor<2x4xf32>
  %l = aten.call "aten::sum"(%z, none) : (tensor<2x4xf32>) -> tensor<f32>
  fsdp.return %l : tensor<f32>
}
