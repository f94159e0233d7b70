// RUN: fsdp-opt --cse --canonicalize --split-input-file %s | FileCheck %s

// Generic passes must not change what the program does.

// A second gather is not merged into the first: that would undo
// reshard-after-forward.

// CHECK-LABEL: fsdp.program @gathers
// CHECK-COUNT-2: fsdp.all_gather
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @gathers(%x: tensor<4xf32>) -> tensor<f32> {
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %a = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  fsdp.reshard @u %a : tensor<4xf32>
  %b = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  %loss = aten.call "aten::dot"(%x, %b) : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
  fsdp.reshard @u %b : tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// Two allocations are two: each is filled with its own random numbers. What is
// unused and has no effect goes; equal views are one.

// CHECK-LABEL: fsdp.program @allocations
// CHECK-COUNT-2: aten.call "aten::empty_like"
// CHECK-COUNT-2: aten.call "aten::bernoulli_.float"
// CHECK-NOT:     aten.call "aten::relu"
// CHECK:         %[[T:.*]] = aten.call "aten::t"
// CHECK-NEXT:    aten.call "aten::mm"(%[[T]], %[[T]])
fsdp.program @allocations(%x: tensor<4x4xf32>) -> tensor<f32> {
  %a = aten.call "aten::empty_like"(%x, none, none, none, none, none) : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %b = aten.call "aten::empty_like"(%x, none, none, none, none, none) : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %a1 = aten.call "aten::bernoulli_.float"(%a, 0.5, none) {mutates = array<i64: 0>, random, views = array<i64: 0>} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %b1 = aten.call "aten::bernoulli_.float"(%b, 0.5, none) {mutates = array<i64: 0>, random, views = array<i64: 0>} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %unused = aten.call "aten::relu"(%x) : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %t0 = aten.call "aten::t"(%x) {views = array<i64: 0>} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %t1 = aten.call "aten::t"(%x) {views = array<i64: 0>} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %m = aten.call "aten::mm"(%t0, %t1) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %loss = aten.call "aten::sum"(%m, none) : (tensor<4x4xf32>) -> tensor<f32>
  fsdp.return %loss : tensor<f32>
}

// -----

// A call without results is there for what it checks.

// CHECK-LABEL: fsdp.program @assertions
// CHECK-COUNT-2: aten.call "aten::_assert_async.msg"
fsdp.program @assertions(%x: tensor<f32>) -> tensor<f32> {
  aten.call "aten::_assert_async.msg"(%x, "expected a loss") : (tensor<f32>) -> ()
  aten.call "aten::_assert_async.msg"(%x, "expected a loss") : (tensor<f32>) -> ()
  fsdp.return %x : tensor<f32>
}
