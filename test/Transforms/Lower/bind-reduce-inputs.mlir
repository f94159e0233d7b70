// RUN: fsdp-opt --fsdp-bind-reduce-inputs --split-input-file --remarks-filter=fsdp-in-place --remark-format=emitRemark %s 2>%t | FileCheck %s
// RUN: FileCheck %s --check-prefix=REMARK < %t

// The gradient is a view of what `mm` allocates: `mm` may write it where the
// reduction reads it.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         aten.call "aten::mm"(%{{.*}}, %{{.*}}) {reduce_input_of = @w}
// CHECK-NEXT:    aten.call "aten::t"(%{{.*}}) {views = array<i64: 0>}
// REMARK:        remark: [Passed] InPlace {{.*}}unit u: 1 of 1 gradients are written where the reduction reads them
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4x8xf32> unit @u sharding <@world, [{"shard"}, {}]>
fsdp.program @train_step(%x: tensor<8x2xf32>, %y: tensor<2x4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<8x2xf32>) -> tensor<f32>
  fsdp.phase backward
  %m = aten.call "aten::mm"(%x, %y) : (tensor<8x2xf32>, tensor<2x4xf32>) -> tensor<8x4xf32>
  %g = aten.call "aten::t"(%m) {views = array<i64: 0>} : (tensor<8x4xf32>) -> tensor<4x8xf32>
  %r = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4x8xf32>) -> !fsdp.sharded<tensor<4x8xf32>, <@world, [{"shard"}, {}]>>
  fsdp.return %loss : tensor<f32>
}

// -----

// Not bound: storage that something reads after the reduction, storage larger
// than the gradient, a result that is not the first, an input of the program.

// CHECK-LABEL: fsdp.program @train_step
// CHECK-NOT:     reduce_input_of
// REMARK:        remark: [Missed] InPlace {{.*}}unit u: the gradient of a is copied into the reduction: its storage is used after the reduction
// REMARK:        remark: [Missed] {{.*}}the gradient of b {{.*}}: it is only a part of its storage
// REMARK:        remark: [Missed] {{.*}}the gradient of c {{.*}}: it is not the first result of its operator
// REMARK:        remark: [Missed] {{.*}}the gradient of d {{.*}}: no operator allocates it
// REMARK:        remark: [Passed] {{.*}}unit u: 0 of 4 gradients are written
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @b : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @c : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @d : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  fsdp.phase backward
  %later = aten.call "aten::relu"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %wide = aten.call "aten::cat"([%x, %x], 0) : (tensor<4xf32>, tensor<4xf32>) -> tensor<8xf32>
  %slice = aten.call "aten::slice.Tensor"(%wide, 0, 0, 4, 1) {views = array<i64: 0>} : (tensor<8xf32>) -> tensor<4xf32>
  %max:2 = aten.call "aten::aminmax"(%x, none, false) : (tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
  %r:4 = fsdp.reduce_scatter @u avg [@a, @b, @c, @d] %later, %slice, %max#1, %x : (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>, tensor<4xf32>) -> (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>)
  %loss = aten.call "aten::sum"(%later, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.return %loss : tensor<f32>
}
