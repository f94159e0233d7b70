// RUN: fsdp-opt --fsdp-insert-frees %s | FileCheck %s

// Every value ends after its last use, an unused one at once; the loss does
// not, and gathered parameters end with their reshard.

// CHECK-LABEL: fsdp.program @train_step
// CHECK-SAME:    (%[[X:.*]]: tensor<4xf32>)
// CHECK:         %[[W:.*]] = fsdp.all_gather
// CHECK-NEXT:    %[[H:.*]] = aten.call "aten::mul.Tensor"(%[[X]], %[[W]])
// CHECK-NEXT:    fsdp.free %[[X]] : tensor<4xf32>
// CHECK-NEXT:    fsdp.reshard @u %[[W]]
// CHECK-NEXT:    %[[M:.*]]:2 = aten.call "aten::max.dim"(%[[H]]
// CHECK-NEXT:    fsdp.free %[[H]], %[[M]]#1 : tensor<4xf32>, tensor<i64>
// CHECK-NEXT:    fsdp.return %[[M]]#0
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %w = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  %h = aten.call "aten::mul.Tensor"(%x, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  fsdp.reshard @u %w : tensor<4xf32>
  %m:2 = aten.call "aten::max.dim"(%h, 0, false) : (tensor<4xf32>) -> (tensor<f32>, tensor<i64>)
  fsdp.return %m#0 : tensor<f32>
}

// The init program: what an overwrite left behind ends before the next value
// begins, and each value with its write.

// CHECK-LABEL: fsdp.program @init
// CHECK:         %[[A:.*]] = aten.call "aten::zeros"
// CHECK-NEXT:    %[[D:.*]] = aten.call "aten::uniform_"(%[[A]]
// CHECK-NEXT:    fsdp.free %[[A]], %[[D]] : tensor<4xf32>, tensor<4xf32>
// CHECK-NEXT:    %[[B:.*]] = aten.call "aten::ones"
// CHECK-NEXT:    fsdp.write_param @w, %[[B]]
// CHECK-NEXT:    fsdp.free %[[B]] : tensor<4xf32>
// CHECK-NEXT:    fsdp.return
fsdp.program @init() {
  %a = aten.call "aten::zeros"([4], 6, none, device, none) : () -> tensor<4xf32>
  %d = aten.call "aten::uniform_"(%a, 0.0, 1.0, none) {mutates = array<i64: 0>, random, views = array<i64: 0>} : (tensor<4xf32>) -> tensor<4xf32>
  %b = aten.call "aten::ones"([4], 6, none, device, none) : () -> tensor<4xf32>
  fsdp.write_param @w, %b : tensor<4xf32>
  fsdp.return
}
