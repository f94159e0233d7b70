// RUN: fsdp-opt --fsdp-insert-reduce-scatters --split-input-file %s | FileCheck %s

// One reduction a unit after the last of its gradients, in unit order although
// backward wrote the bias first; a parameter without gradient takes no part.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[GB:.*]] = aten.call "aten::relu"
// CHECK-NEXT:    %[[GW:.*]] = aten.call "aten::mm"
// CHECK-NEXT:    %[[R:.*]]:2 = fsdp.reduce_scatter @u avg [@w, @b] %[[GW]], %[[GB]] : (tensor<4x4xf32>, tensor<4xf32>) -> (!fsdp.sharded<tensor<4x4xf32>, <@world, [{"shard"}, {}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>)
// CHECK-NEXT:    fsdp.write_grad @w, %[[R]]#0
// CHECK-NEXT:    fsdp.write_grad @b, %[[R]]#1
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
  fsdp.write_grad @b, %gb : tensor<4xf32>
  %gw = aten.call "aten::mm"(%x, %x) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  fsdp.write_grad @w, %gw : tensor<4x4xf32>
  fsdp.return %loss : tensor<f32>
}
