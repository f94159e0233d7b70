// RUN: fsdp-opt --fsdp-place-storages --split-input-file %s | FileCheck %s

// Two results that are not alive at the same time have one place; a view has
// that of its storage.
fsdp.mesh @world <["shard"=1]>
fsdp.optimizer "sgd" {lr = 1.0e-1}
fsdp.program @train_step(%x: tensor<16xf32>) -> tensor<f32> {
  fsdp.phase forward
  %a = aten.call "aten::neg"(%x) : (tensor<16xf32>) -> tensor<16xf32>
  fsdp.free %x : tensor<16xf32>
  %v = aten.call "aten::view"(%a, [4, 4]) {views = array<i64: 0>} : (tensor<16xf32>) -> tensor<4x4xf32>
  fsdp.free %a : tensor<16xf32>
  %b = aten.call "aten::sin"(%v) : (tensor<4x4xf32>) -> tensor<4x4xf32>
  fsdp.free %v : tensor<4x4xf32>
  %c = aten.call "aten::cos"(%b) : (tensor<4x4xf32>) -> tensor<4x4xf32>
  fsdp.free %b : tensor<4x4xf32>
  %loss = aten.call "aten::sum"(%c, none) : (tensor<4x4xf32>) -> tensor<f32>
  fsdp.free %c : tensor<4x4xf32>
  fsdp.return %loss : tensor<f32>
}

// CHECK:       module attributes {fsdp.arena = {bytes = 128 : i64, lower_bound = 128 : i64}, fsdp.level = #fsdp.level<planned>, fsdp.memory = "shared"}
// CHECK:       fsdp.program @train_step(%arg0: tensor<16xf32> {fsdp.offset = [[X:[0-9]+]] : i64})
// CHECK:         aten.call "aten::neg"(%{{.*}}) {fsdp.offsets = array<i64: [[A:[0-9]+]]>} :
// CHECK:         aten.call "aten::view"(%{{.*}}) {views
// CHECK:         aten.call "aten::sin"(%{{.*}}) {fsdp.offsets = array<i64: [[X]]>} :
// CHECK:         aten.call "aten::cos"(%{{.*}}) {fsdp.offsets = array<i64: [[A]]>} :
// CHECK:         aten.call "aten::sum"(%{{.*}}, none) {fsdp.offsets = array<i64: [[X]]>} :

// -----

// A gathered parameter has a place of its own where ranks have memory of their
// own, an unused result has none, and what has been copied to the host has one
// there.
module attributes {fsdp.memory = "device"} {
  fsdp.mesh @world <["shard"=2]>
  fsdp.unit @u
  fsdp.param @w : tensor<16xf32> unit @u sharding <@world, [{"shard"}]> {frozen}
  fsdp.optimizer "sgd" {lr = 1.0e-1}
  fsdp.program @train_step(%x: tensor<16xf32>) -> tensor<f32> {
    fsdp.phase forward
    %s = fsdp.read @w : !fsdp.sharded<tensor<16xf32>, <@world, [{"shard"}]>>
    %w = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<16xf32>, <@world, [{"shard"}]>>) -> tensor<16xf32>
    %m:2 = aten.call "aten::max.dim"(%w, 0, false) : (tensor<16xf32>) -> (tensor<f32>, tensor<i64>)
    %a = aten.call "aten::neg"(%w) : (tensor<16xf32>) -> tensor<16xf32>
    %h = fsdp.offload_activation %a : tensor<16xf32> to !fsdp.host<tensor<16xf32>>
    fsdp.free %a : tensor<16xf32>
    fsdp.reshard @u %w : tensor<16xf32>
    fsdp.phase backward
    %b = fsdp.reload_activation %h : !fsdp.host<tensor<16xf32>> to tensor<16xf32>
    %g = aten.call "aten::mul.Tensor"(%b, %x) : (tensor<16xf32>, tensor<16xf32>) -> tensor<16xf32>
    fsdp.free %b, %g, %x : tensor<16xf32>, tensor<16xf32>, tensor<16xf32>
    fsdp.return %m#0 : tensor<f32>
  }
}

// CHECK:       module attributes {fsdp.arena = {bytes = [[BYTES:[0-9]+]] : i64, lower_bound = [[BYTES]] : i64}, fsdp.host_arena = {bytes = 64 : i64, lower_bound = 64 : i64}
// CHECK:         fsdp.all_gather @u %{{.*}} {fsdp.offsets = array<i64: {{[0-9]+}}>} :
// CHECK:         aten.call "aten::max.dim"(%{{.*}}, 0, false) {fsdp.offsets = array<i64: {{[0-9]+}}, -1>} :
// CHECK:         fsdp.offload_activation %{{.*}} {fsdp.offsets = array<i64: 0>} :
// CHECK:         fsdp.reload_activation %{{.*}} {fsdp.offsets = array<i64: {{[0-9]+}}>} :
