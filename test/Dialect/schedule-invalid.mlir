// RUN: fsdp-opt --split-input-file --verify-diagnostics %s

// expected-error @below {{Schedule-1: expected prefetch "latest_safe", "fsdp2", "none", got: "early"}}
fsdp.schedule {prefetch = "early"}

// -----

// expected-error @below {{Schedule-1: expected at least one reduce-scatter in flight, got: 0}}
fsdp.schedule {reduce_scatters_in_flight = 0 : i64}

// -----

// expected-error @below {{Schedule-1: expected a positive memory_budget, got: -1}}
fsdp.schedule {memory_budget = -1 : i64}

// -----

// expected-error @below {{Schedule-1: expected a memory_budget with memory "auto"}}
fsdp.schedule {memory = "auto"}

// -----

// expected-error @below {{Why-1: expected a string as fsdp.why, got: 1 : i64}}
fsdp.unit @u {fsdp.why = 1 : i64}

// -----

// expected-error @below {{Why-1: expected a string as fsdp.why, got: ""}}
fsdp.unit @u {fsdp.why = ""}

// -----

// expected-error @below {{Origin-1: expected a string as fsdp.module, got: 1 : i64}}
fsdp.unit @u {fsdp.module = 1 : i64}

// -----

// expected-error @below {{Origin-1: expected a string as fsdp.line, got: ""}}
fsdp.unit @u {fsdp.line = ""}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @never_awaited(%x: tensor<f32>) -> tensor<f32> {
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  // expected-error @below {{Program-10: expected a wait for its future, found none}}
  %f = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.future<tensor<4xf32>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @awaited_twice(%x: tensor<f32>) -> tensor<f32> {
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %f = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.future<tensor<4xf32>>
  %w = fsdp.wait %f : !fsdp.future<tensor<4xf32>>
  // expected-error @below {{Program-10: expected one wait for the future of a collective, got a second}}
  %v = fsdp.wait %f : !fsdp.future<tensor<4xf32>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @freed_while_reduced(%x: tensor<4xf32>, %l: tensor<f32>) -> tensor<f32> {
  %g = aten.call "aten::neg"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  // expected-note @below {{begun here}}
  %f = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4xf32>) -> !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  // expected-error @below {{Program-11: frees what a collective in flight reads}}
  fsdp.free %g : tensor<4xf32>
  %r = fsdp.wait %f : !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  fsdp.return %l : tensor<f32>
}

// -----

// What a view is a part of may be freed: the view, until it is freed itself,
// keeps the storage.
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @part_freed_while_reduced(%x: tensor<8xf32>, %l: tensor<f32>) -> tensor<f32> {
  %a = aten.call "aten::neg"(%x) : (tensor<8xf32>) -> tensor<8xf32>
  %g = aten.call "aten::slice.Tensor"(%a, 0, 0, 4, 1) {views = array<i64: 0>} : (tensor<8xf32>) -> tensor<4xf32>
  // expected-note @below {{begun here}}
  %f = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4xf32>) -> !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  fsdp.free %a : tensor<8xf32>
  // expected-error @below {{Program-11: frees what a collective in flight reads}}
  fsdp.free %g : tensor<4xf32>
  %r = fsdp.wait %f : !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  fsdp.return %l : tensor<f32>
}

// -----

// A view in place is the storage that the reduction reads.
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @written_while_reduced(%x: tensor<4xf32>, %l: tensor<f32>) -> tensor<f32> {
  %g = aten.call "aten::neg"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %v = aten.call "aten::view"(%g, [2, 2]) {views = array<i64: 0>} : (tensor<4xf32>) -> tensor<2x2xf32>
  // expected-note @below {{begun here}}
  %f = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4xf32>) -> !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  // expected-error @below {{Program-11: writes what a collective in flight reads}}
  %z = aten.call "aten::zero_"(%v) {mutates = array<i64: 0>, views = array<i64: 0>} : (tensor<2x2xf32>) -> tensor<2x2xf32>
  %r = fsdp.wait %f : !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  fsdp.return %l : tensor<f32>
}

// -----

// Of a future, too, types are compared.
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @type_of_a_future(%l: tensor<f32>) -> tensor<f32> {
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  // expected-error @below {{AllGather-2: expected a result of 'tensor<4xf32>', got: 'tensor<2xf32>'}}
  %f = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.future<tensor<2xf32>>
  %w = fsdp.wait %f : !fsdp.future<tensor<2xf32>>
  fsdp.return %l : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.program @stage_of_no_unit(%l: tensor<f32>) -> tensor<f32> {
  // expected-error @below {{StageState-1: expected a unit, got: @u}}
  %f = fsdp.stage_state @u : !fsdp.future<>
  fsdp.wait %f : !fsdp.future<>
  fsdp.return %l : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.program @stage_with_results(%l: tensor<f32>) -> tensor<f32> {
  // expected-error @below {{StageState-1: expected a future without results, got: '!fsdp.future<tensor<f32>>'}}
  %f = fsdp.stage_state @u : !fsdp.future<tensor<f32>>
  %r = fsdp.wait %f : !fsdp.future<tensor<f32>>
  fsdp.return %l : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.program @stage_never_awaited(%l: tensor<f32>) -> tensor<f32> {
  // expected-error @below {{Program-10: expected a wait for its future}}
  %f = fsdp.stage_state @u : !fsdp.future<>
  fsdp.return %l : tensor<f32>
}

// -----

// expected-error @below {{Schedule-1: expected fuse "none", "exact", "unproven", got: "fast"}}
fsdp.schedule {fuse = "fast"}
