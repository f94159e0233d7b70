// RUN: fsdp-opt --fsdp-insert-buffers --split-input-file %s | FileCheck %s

// FSDP2's flat tensor of a reduction over two ranks, in the dtype of the
// reduction: a row for each rank, of as many elements as rank 0 has of each
// gradient. It ends where the compute stream knows that the reduction has.
module attributes {fsdp.memory = "device"} {
  fsdp.mesh @world <["shard"=2]>
  fsdp.unit @u
  fsdp.param @w : tensor<5xf32> unit @u sharding <@world, [{"shard"}]>
  fsdp.optimizer "sgd" {lr = 1.0e-1}
  fsdp.program @train_step(%x: tensor<5xf32>) -> tensor<f32> {
    fsdp.phase forward
    %loss = aten.call "aten::sum"(%x, none) : (tensor<5xf32>) -> tensor<f32>
    fsdp.phase backward
    %g = aten.call "aten::neg"(%x) {fsdp.records = 0 : i32} : (tensor<5xf32>) -> tensor<5xf32>
    %rf = fsdp.reduce_scatter @u avg [@w] %g {fsdp.records = 1 : i32, fsdp.stream = "reduce_scatter", fsdp.waits = array<i32: 0>} : (tensor<5xf32>) -> !fsdp.future<!fsdp.sharded<tensor<5xf32>, <@world, [{"shard"}]>>>
    %y = aten.call "aten::sin"(%x) : (tensor<5xf32>) -> tensor<5xf32>
    %r = fsdp.wait %rf {fsdp.waits = array<i32: 1>} : !fsdp.future<!fsdp.sharded<tensor<5xf32>, <@world, [{"shard"}]>>>
    fsdp.free %g : tensor<5xf32>
    fsdp.phase optimizer
    fsdp.optimizer_step [@w] %r : !fsdp.sharded<tensor<5xf32>, <@world, [{"shard"}]>>
    fsdp.return %loss : tensor<f32>
  }
}

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[G:.*]] = aten.call "aten::neg"
// CHECK-NEXT:    %[[B:.*]] = fsdp.allocate : tensor<6xf32>
// CHECK-NEXT:    fsdp.reduce_scatter @u avg [@w] %[[G]] in %[[B]] : tensor<6xf32> {fsdp.records
// CHECK-NEXT:    aten.call "aten::sin"
// CHECK-NEXT:    fsdp.wait
// CHECK-NEXT:    fsdp.free %[[G]]
// CHECK-NEXT:    fsdp.free %[[B]] : tensor<6xf32>

// -----

// The copies of an offloaded unit, as bytes, and the parts that groups of two
// keep.
module attributes {fsdp.memory = "device"} {
  fsdp.mesh @world <["shard"=4]>
  fsdp.unit @u {cpu_offload, post_forward_size = 2 : i64}
  fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
  fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
    fsdp.phase forward
    %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
    %d = fsdp.copy_to_device @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
    %w = fsdp.all_gather @u %d : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
    %loss = aten.call "aten::dot"(%x, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
    %k = fsdp.reshard @u %w : tensor<4xf32> to !fsdp.sharded<tensor<4xf32>, <@world, [{"shard":2}]>>
    fsdp.phase backward
    %v = fsdp.all_gather @u %k : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard":2}]>>) -> tensor<4xf32>
    fsdp.reshard @u %v : tensor<4xf32>
    fsdp.no_gradient [@w]
    fsdp.return %loss : tensor<f32>
  }
}

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[C:.*]] = fsdp.allocate : tensor<64xui8>
// CHECK-NEXT:    %[[D:.*]] = fsdp.copy_to_device @u %{{.*}} in %[[C]] : tensor<64xui8> :
// CHECK-NEXT:    %[[W:.*]] = fsdp.all_gather @u %[[D]] :
// CHECK-NEXT:    fsdp.free %[[C]]
// CHECK-NEXT:    aten.call
// CHECK-NEXT:    %[[K:.*]] = fsdp.allocate : tensor<64xui8>
// CHECK-NEXT:    %[[P:.*]] = fsdp.reshard @u %[[W]] in %[[K]] : tensor<64xui8> :
// CHECK-NEXT:    fsdp.phase backward
// CHECK-NEXT:    fsdp.all_gather @u %[[P]] :
// CHECK-NEXT:    fsdp.free %[[K]]

// -----

// Ranks that share memory reduce where the gradients are.
module attributes {fsdp.memory = "shared"} {
  fsdp.mesh @world <["shard"=2]>
  fsdp.unit @u
  fsdp.param @w : tensor<5xf32> unit @u sharding <@world, [{"shard"}]>
  fsdp.optimizer "sgd" {lr = 1.0e-1}
  fsdp.program @train_step(%x: tensor<5xf32>) -> tensor<f32> {
    fsdp.phase forward
    %loss = aten.call "aten::sum"(%x, none) : (tensor<5xf32>) -> tensor<f32>
    fsdp.phase backward
    %r = fsdp.reduce_scatter @u avg [@w] %x : (tensor<5xf32>) -> !fsdp.sharded<tensor<5xf32>, <@world, [{"shard"}]>>
    fsdp.phase optimizer
    fsdp.optimizer_step [@w] %r : !fsdp.sharded<tensor<5xf32>, <@world, [{"shard"}]>>
    fsdp.return %loss : tensor<f32>
  }
}

// CHECK-LABEL: fsdp.memory = "shared"
// CHECK-NOT:     fsdp.allocate
