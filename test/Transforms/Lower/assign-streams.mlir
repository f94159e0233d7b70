// RUN: fsdp-opt --fsdp-assign-streams --split-input-file %s | FileCheck %s

// The gather begins beside the compute stream, after what stands before it, and
// so does the reduction. Where one is awaited, the compute stream waits for its
// event. What has no future is on the compute stream.
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %y = aten.call "aten::neg"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %f = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.future<tensor<4xf32>>
  %z = aten.call "aten::sin"(%y) : (tensor<4xf32>) -> tensor<4xf32>
  %w = fsdp.wait %f : !fsdp.future<tensor<4xf32>>
  %loss = aten.call "aten::dot"(%z, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  fsdp.reshard @u %w : tensor<4xf32>
  %g = aten.call "aten::cos"(%z) : (tensor<4xf32>) -> tensor<4xf32>
  %rf = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4xf32>) -> !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  %r = fsdp.wait %rf : !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  fsdp.gradients [@w] %r : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         aten.call "aten::neg"(%{{.*}}) {fsdp.records = 0 : i32} :
// CHECK-NEXT:    %[[S:.*]] = fsdp.read @w : !fsdp.sharded
// CHECK-NEXT:    fsdp.all_gather @u %[[S]] {fsdp.records = 1 : i32, fsdp.stream = "all_gather", fsdp.waits = array<i32: 0>} :
// CHECK-NEXT:    aten.call "aten::sin"(%{{.*}}) :
// CHECK-NEXT:    fsdp.wait %{{.*}} {fsdp.waits = array<i32: 1>} :
// CHECK-NEXT:    aten.call "aten::dot"(%{{.*}}, %{{.*}}) :
// CHECK-NEXT:    fsdp.phase backward
// CHECK-NEXT:    fsdp.reshard @u %{{.*}} : tensor<4xf32>
// CHECK-NEXT:    aten.call "aten::cos"(%{{.*}}) {fsdp.records = 2 : i32} :
// CHECK-NEXT:    fsdp.reduce_scatter @u avg [@w] %{{.*}} {fsdp.records = 3 : i32, fsdp.stream = "reduce_scatter", fsdp.waits = array<i32: 2>} :
// CHECK-NEXT:    fsdp.wait %{{.*}} {fsdp.waits = array<i32: 3>} :

// -----

// Copies of an offloaded unit run beside computation where the gather of them
// does, and the gather waits for them. A second gather that nothing was computed
// before waits for no more.
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u {cpu_offload}
fsdp.unit @v
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @b : tensor<4xf32> unit @v sharding <@world, [{"shard"}]>
fsdp.program @evaluate(%x: tensor<4xf32>) -> tensor<f32> attributes {evaluation} {
  %y = aten.call "aten::neg"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %d = fsdp.copy_to_device @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %f = fsdp.all_gather @u %d : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.future<tensor<4xf32>>
  %t = fsdp.read @b : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %h = fsdp.all_gather @v %t : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.future<tensor<4xf32>>
  %w = fsdp.wait %f : !fsdp.future<tensor<4xf32>>
  %b = fsdp.wait %h : !fsdp.future<tensor<4xf32>>
  %loss = aten.call "aten::dot"(%b, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
  fsdp.reshard @u %w : tensor<4xf32>
  fsdp.reshard @v %b : tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}

// CHECK-LABEL: fsdp.program @evaluate
// CHECK-NEXT:    aten.call "aten::neg"(%{{.*}}) {fsdp.records = 0 : i32} :
// CHECK:         fsdp.copy_to_device @u %{{.*}} {fsdp.records = 1 : i32, fsdp.stream = "copy_to_device", fsdp.waits = array<i32: 0>} :
// CHECK-NEXT:    fsdp.all_gather @u %{{.*}} {fsdp.records = 2 : i32, fsdp.stream = "all_gather", fsdp.waits = array<i32: 0, 1>} :
// CHECK:         fsdp.all_gather @v %{{.*}} {fsdp.records = 3 : i32, fsdp.stream = "all_gather"} :
// CHECK-NEXT:    fsdp.wait %{{.*}} {fsdp.waits = array<i32: 2>} :
// CHECK-NEXT:    fsdp.wait %{{.*}} {fsdp.waits = array<i32: 3>} :

// -----

// A microbatch that begins with a gather: it follows the compute stream of the
// microbatch before.
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  %loss = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1):
    %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
    %f = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.future<tensor<4xf32>>
    %w = fsdp.wait %f : !fsdp.future<tensor<4xf32>>
    %l = aten.call "aten::dot"(%x, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
    fsdp.reshard @u %w : tensor<4xf32>
    fsdp.yield %l : tensor<f32>
  }
  fsdp.return %loss : tensor<f32>
}

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         ^bb0
// CHECK-NEXT:      fsdp.read @w
// CHECK-NEXT:      fsdp.mark {fsdp.records = 0 : i32}
// CHECK-NEXT:      fsdp.all_gather @u %{{.*}} {fsdp.records = 1 : i32, fsdp.stream = "all_gather", fsdp.waits = array<i32: 0>} :
// CHECK-NEXT:      fsdp.wait %{{.*}} {fsdp.waits = array<i32: 1>} :

// -----

// A wait in the first microbatch alone: in the others the gather that is launched
// behind it follows the last instruction that runs there. A gather in the first
// microbatch alone has made the stream wait in that one only.
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.unit @v
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @b : tensor<4xf32> unit @v sharding <@world, [{"shard"}]>
fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  %loss = fsdp.microbatches 3(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1, %before: !fsdp.carried<tensor<4xf32>>):
    %y = aten.call "aten::neg"(%x) : (tensor<4xf32>) -> tensor<4xf32>
    %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
    %f = fsdp.all_gather @u %s when %first else %before : !fsdp.carried<tensor<4xf32>> : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.future<tensor<4xf32>>
    %w = fsdp.wait %f : !fsdp.future<tensor<4xf32>>
    %t = fsdp.read @b : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
    %h = fsdp.all_gather @v %t : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.future<tensor<4xf32>>
    %b = fsdp.wait %h : !fsdp.future<tensor<4xf32>>
    %l = aten.call "aten::dot"(%b, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
    fsdp.reshard @v %b : tensor<4xf32>
    fsdp.reshard @u %w when %last : tensor<4xf32>
    fsdp.yield %l : tensor<f32> carry %w : tensor<4xf32>
  }
  fsdp.return %loss : tensor<f32>
}

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         aten.call "aten::neg"(%{{.*}}) {fsdp.records = 0 : i32} :
// CHECK:         fsdp.all_gather @u %{{.*}} when %{{.*}} {fsdp.records = 1 : i32, fsdp.stream = "all_gather", fsdp.waits = array<i32: 0>} :
// CHECK-NEXT:    fsdp.wait %{{.*}} {fsdp.records = 2 : i32, fsdp.waits = array<i32: 1>} :
// CHECK:         fsdp.all_gather @v %{{.*}} {fsdp.records = 3 : i32, fsdp.stream = "all_gather", fsdp.waits = array<i32: 2, 0>} :
