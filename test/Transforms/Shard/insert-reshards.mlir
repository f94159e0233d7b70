// RUN: fsdp-opt --fsdp-insert-reshards --split-input-file --remarks-filter=fsdp-reshard --remark-format=emitRemark %s 2>%t | FileCheck %s
// RUN: FileCheck %s --check-prefix=REMARK < %t

// With reshard_after_forward the unit is gathered again for backward, and the
// view `t` that forward took is rebuilt from the second gather.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[S:.*]] = fsdp.read @w
// CHECK-NEXT:    %[[W:.*]] = fsdp.all_gather @u %[[S]]
// CHECK-NEXT:    %[[T:.*]] = aten.call "aten::t"(%[[W]])
// CHECK-NEXT:    aten.call "aten::mm"(%{{.*}}, %[[T]])
// CHECK-NEXT:    fsdp.reshard @u %[[W]] {fsdp.why = "after the last use in forward: the unit is gathered again for backward"}
// CHECK:         fsdp.phase backward
// CHECK-NEXT:    %[[S2:.*]] = fsdp.read @w
// CHECK-NEXT:    %[[W2:.*]] = fsdp.all_gather @u %[[S2]]
// CHECK-NEXT:    %[[T2:.*]] = aten.call "aten::t"(%[[W2]])
// CHECK-NEXT:    aten.call "aten::mm"(%{{.*}}, %[[T2]])
// CHECK-NEXT:    fsdp.reshard @u %[[W2]] {fsdp.why = "after the last use in backward"}
// REMARK:        remark: [Passed] Reshard {{.*}}unit u: resharded after forward, gathered again for backward
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u {reshard_after_forward = true}
fsdp.param @w : tensor<4x4xf32> unit @u sharding <@world, [{"shard"}, {}]>
fsdp.program @train_step(%x: tensor<4x4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %s = fsdp.read @w : !fsdp.sharded<tensor<4x4xf32>, <@world, [{"shard"}, {}]>>
  %w = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4x4xf32>, <@world, [{"shard"}, {}]>>) -> tensor<4x4xf32>
  %t = aten.call "aten::t"(%w) {views = array<i64: 0>} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %y = aten.call "aten::mm"(%x, %t) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %loss = aten.call "aten::sum"(%y, none) : (tensor<4x4xf32>) -> tensor<f32>
  fsdp.phase backward
  %g = aten.call "aten::mm"(%y, %t) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  fsdp.gradients [@w] %g : tensor<4x4xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// A chain of views that ends in one taken by backward: only what forward took
// is rebuilt.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         fsdp.phase backward
// CHECK:         %[[W2:.*]] = fsdp.all_gather @u
// CHECK-NEXT:    %[[V2:.*]] = aten.call "aten::view"(%[[W2]], [4, 4])
// CHECK-NEXT:    %[[B:.*]] = aten.call "aten::t"(%[[V2]])
// CHECK-NEXT:    aten.call "aten::mm"(%{{.*}}, %[[B]])
// CHECK-NEXT:    fsdp.reshard @u %[[W2]]
// CHECK-NOT:     fsdp.all_gather
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u {reshard_after_forward = true}
fsdp.param @w : tensor<16xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4x4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %s = fsdp.read @w : !fsdp.sharded<tensor<16xf32>, <@world, [{"shard"}]>>
  %w = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<16xf32>, <@world, [{"shard"}]>>) -> tensor<16xf32>
  %v = aten.call "aten::view"(%w, [4, 4]) {views = array<i64: 0>} : (tensor<16xf32>) -> tensor<4x4xf32>
  %y = aten.call "aten::mm"(%x, %v) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %loss = aten.call "aten::sum"(%y, none) : (tensor<4x4xf32>) -> tensor<f32>
  fsdp.phase backward
  %b = aten.call "aten::t"(%v) {views = array<i64: 0>} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %g = aten.call "aten::mm"(%y, %b) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  fsdp.no_gradient [@w]
  fsdp.return %loss : tensor<f32>
}

// -----

// Without reshard_after_forward one gather serves both phases and ends after
// its last use in backward.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[W:.*]] = fsdp.all_gather @u
// CHECK-NOT:     fsdp.reshard
// CHECK:         fsdp.phase backward
// CHECK-NEXT:    aten.call "aten::mul.Tensor"(%{{.*}}, %[[W]])
// CHECK-NEXT:    fsdp.reshard @u %[[W]] {fsdp.why = "after the last use: the unit stays gathered between forward and backward"}
// REMARK:        remark: [Passed] Reshard {{.*}}unit u: stays gathered between forward and backward: reshard_after_forward is false
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u {reshard_after_forward = false}
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %w = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  %loss = aten.call "aten::dot"(%x, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %g = aten.call "aten::mul.Tensor"(%x, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  fsdp.gradients [@w] %g : tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// Backward does not use the parameter: one gather, ended in forward.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[W:.*]] = fsdp.all_gather @u
// CHECK-NEXT:    aten.call "aten::add.Tensor"
// CHECK-NEXT:    fsdp.reshard @u %[[W]] {fsdp.why = "after the last use: backward does not need it"}
// CHECK-NOT:     fsdp.all_gather
// REMARK:        remark: [Passed] Reshard {{.*}}unit u: resharded after forward: backward does not need it
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u {reshard_after_forward = true}
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %w = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  %y = aten.call "aten::add.Tensor"(%x, %w, 1) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  %loss = aten.call "aten::sum"(%y, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %g = aten.call "aten::ones_like"(%y, none, none, none, none, none) : (tensor<4xf32>) -> tensor<4xf32>
  fsdp.gradients [@w] %g : tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// With post_forward_size the first reshard keeps parts, over groups of 2
// neighbours, and backward gathers those.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[W:.*]] = fsdp.all_gather @u
// CHECK-NEXT:    aten.call "aten::dot"(%{{.*}}, %[[W]])
// CHECK-NEXT:    %[[K:.*]] = fsdp.reshard @u %[[W]] {fsdp.why = "after the last use in forward: each of 2 neighbours keeps a part"} : tensor<4xf32> to !fsdp.sharded<tensor<4xf32>, <@world, [{"shard":2}]>>
// CHECK-NEXT:    fsdp.phase backward
// CHECK-NOT:     fsdp.read
// CHECK:         %[[W2:.*]] = fsdp.all_gather @u %[[K]] : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard":2}]>>) -> tensor<4xf32>
// CHECK-NEXT:    aten.call "aten::mul.Tensor"(%{{.*}}, %[[W2]])
// CHECK-NEXT:    fsdp.reshard @u %[[W2]] {fsdp.why = "after the last use in backward"} : tensor<4xf32>{{$}}
// REMARK:        remark: [Missed] Reshard {{.*}}unit u: resharded after forward, a part on each of 2 neighbours, and immediately gathered again: nothing is computed in between
fsdp.mesh @world <["shard"=4]>
fsdp.unit @u {post_forward_size = 2}
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %w = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  %loss = aten.call "aten::dot"(%x, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %g = aten.call "aten::mul.Tensor"(%x, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  fsdp.gradients [@w] %g : tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// Nothing is kept where backward does not gather.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[W:.*]] = fsdp.all_gather @u
// CHECK-NEXT:    aten.call "aten::dot"
// CHECK-NEXT:    fsdp.reshard @u %[[W]] {{.*}} : tensor<4xf32>{{$}}
fsdp.mesh @world <["shard"=4]>
fsdp.unit @u {post_forward_size = 2}
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %w = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  %loss = aten.call "aten::dot"(%x, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  fsdp.no_gradient [@w]
  fsdp.return %loss : tensor<f32>
}
