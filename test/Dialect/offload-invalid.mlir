// RUN: fsdp-opt --split-input-file --verify-diagnostics %s

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  // expected-error @below {{CopyToDevice-1: expected @u to be a unit with cpu_offload}}
  %d = fsdp.copy_to_device @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u {cpu_offload}
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>, %s: !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<f32> {
  // expected-error @below {{CopyToDevice-1: expected operands that are fsdp.read, got: <block argument>}}
  %d = fsdp.copy_to_device @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u {cpu_offload}
fsdp.unit @v {cpu_offload}
fsdp.param @w : tensor<4xf32> unit @v sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  // expected-error @below {{CopyToDevice-1: expected @w in unit @u}}
  %d = fsdp.copy_to_device @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u {cpu_offload}
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  %r = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  // expected-error @below {{CopyToHost-1: expected 1 operands and results, got: 2 and 1}}
  %h = fsdp.copy_to_host @u [@w] %r, %r : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u {cpu_offload}
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  %r = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  // expected-error @below {{CopyToHost-1: expected '!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>' for @w, got: '!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>' to '!fsdp.sharded<tensor<4xf32>, <@world, [{}]>>'}}
  %h = fsdp.copy_to_host @u [@w] %r : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u {cpu_offload}
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  %r = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  // expected-error @below {{CopyToHost-1: expected '!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>' for @w, got: '!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>' to '!fsdp.sharded<tensor<4xf32>, <@world, [{}]>>'}}
  %h = fsdp.copy_to_host @u [@w] %r : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{}]>>>
  %c = fsdp.wait %h : !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{}]>>>
  fsdp.return %x : tensor<f32>
}

// -----

// expected-error @below {{OffloadPattern-1: expected a pattern, got: ""}}
fsdp.offload_pattern ""

// -----

// expected-error @below {{OffloadPattern-1: expected a positive min_bytes, got: 0}}
fsdp.offload_pattern "layers.*" {min_bytes = 0 : i64}

// -----

fsdp.program @p(%x: tensor<4xf32>, %l: tensor<f32>) -> tensor<f32> {
  // expected-error @below {{OffloadActivation-1: expected the result of a call that owns its storage first}}
  %h = fsdp.offload_activation %x : tensor<4xf32> to !fsdp.host<tensor<4xf32>>
  fsdp.return %l : tensor<f32>
}

// -----

fsdp.program @p(%x: tensor<4xf32>, %l: tensor<f32>) -> tensor<f32> {
  %a = aten.call "aten::exp"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %v = aten.call "aten::view"(%a, [2, 2]) {views = array<i64: 0>} : (tensor<4xf32>) -> tensor<2x2xf32>
  // expected-error @below {{OffloadActivation-1: expected the result of a call that owns its storage first}}
  %h = fsdp.offload_activation %v : tensor<2x2xf32> to !fsdp.host<tensor<2x2xf32>>
  fsdp.return %l : tensor<f32>
}

// -----

fsdp.program @p(%x: tensor<4xf32>, %l: tensor<f32>) -> tensor<f32> {
  %a = aten.call "aten::exp"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %b = aten.call "aten::exp"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  // expected-error @below {{OffloadActivation-1: expected values of one storage}}
  %h = fsdp.offload_activation %a, %b : tensor<4xf32>, tensor<4xf32> to !fsdp.host<tensor<4xf32>, tensor<4xf32>>
  fsdp.return %l : tensor<f32>
}

// -----

fsdp.program @p(%x: tensor<4xf32>, %l: tensor<f32>) -> tensor<f32> {
  %a = aten.call "aten::exp"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  // expected-error @below {{OffloadActivation-2: expected '!fsdp.host<tensor<4xf32>>' or a future of it, got: '!fsdp.host<tensor<2xf32>>'}}
  %h = fsdp.offload_activation %a : tensor<4xf32> to !fsdp.host<tensor<2xf32>>
  fsdp.return %l : tensor<f32>
}

// -----

fsdp.program @p(%x: tensor<4xf32>, %l: tensor<f32>) -> tensor<f32> {
  %a = aten.call "aten::exp"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %h = fsdp.offload_activation %a : tensor<4xf32> to !fsdp.host<tensor<4xf32>>
  // expected-error @below {{ReloadActivation-1: expected the types of '!fsdp.host<tensor<4xf32>>', got: 'tensor<2xf32>'}}
  %r = fsdp.reload_activation %h : !fsdp.host<tensor<4xf32>> to tensor<2xf32>
  fsdp.return %l : tensor<f32>
}

// -----

// Also by a view that was taken before.
fsdp.program @p(%x: tensor<4xf32>, %l: tensor<f32>) -> tensor<f32> {
  %a = aten.call "aten::exp"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %v = aten.call "aten::view"(%a, [2, 2]) {views = array<i64: 0>} : (tensor<4xf32>) -> tensor<2x2xf32>
  // expected-note @below {{offloaded here}}
  %h = fsdp.offload_activation %a : tensor<4xf32> to !fsdp.host<tensor<4xf32>>
  // expected-error @below {{Program-12: uses an activation on the device that was copied to the host}}
  %b = aten.call "aten::exp"(%v) : (tensor<2x2xf32>) -> tensor<2x2xf32>
  fsdp.return %l : tensor<f32>
}

// -----

// A copy under way reads the device's storage until it is awaited.
fsdp.program @p(%x: tensor<4xf32>, %l: tensor<f32>) -> tensor<f32> {
  %a = aten.call "aten::exp"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  // expected-note @below {{begun here}}
  %f = fsdp.offload_activation %a : tensor<4xf32> to !fsdp.future<!fsdp.host<tensor<4xf32>>>
  // expected-error @below {{Program-11: frees what a collective in flight reads}}
  fsdp.free %a : tensor<4xf32>
  %h = fsdp.wait %f : !fsdp.future<!fsdp.host<tensor<4xf32>>>
  fsdp.return %l : tensor<f32>
}

// -----

fsdp.program @p(%x: tensor<4xf32>, %l: tensor<f32>) -> tensor<f32> {
  %a = aten.call "aten::exp"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %h = fsdp.offload_activation %a : tensor<4xf32> to !fsdp.host<tensor<4xf32>>
  // expected-error @below {{Program-10: expected a wait for its future, found none}}
  %f = fsdp.reload_activation %h : !fsdp.host<tensor<4xf32>> to !fsdp.future<tensor<4xf32>>
  fsdp.return %l : tensor<f32>
}

// -----

fsdp.program @e(%x: tensor<4xf32>, %l: tensor<f32>) -> tensor<f32> attributes {evaluation} {
  %a = aten.call "aten::exp"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  // expected-error @below {{Program-8: expected no such op in an evaluation}}
  %h = fsdp.offload_activation %a : tensor<4xf32> to !fsdp.host<tensor<4xf32>>
  fsdp.return %l : tensor<f32>
}
