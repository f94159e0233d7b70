// RUN: fsdp-opt --split-input-file --verify-diagnostics %s

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @b : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  %a = fsdp.read @a : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %b = fsdp.read @b : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  // expected-error @below {{AllGather-1: expected @a as operand 0 of unit @u, got: @b}}
  %w:2 = fsdp.all_gather @u %b, %a : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> (tensor<4xf32>, tensor<4xf32>)
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @b : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  %a = fsdp.read @a : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  // expected-error @below {{AllGather-1: expected @b as operand 1 of unit @u, got: none}}
  %w = fsdp.all_gather @u %a : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  %a = fsdp.read @a : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  // expected-error @below {{AllGather-2: expected a result of 'tensor<4xf32>', got: 'tensor<2xf32>'}}
  %w = fsdp.all_gather @u %a : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<2xf32>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.unit @u
fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  // expected-error @below {{Reshard-1: expected all results of one fsdp.all_gather, in order}}
  fsdp.reshard @u %x : tensor<f32>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.unit @v
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  %a = fsdp.read @a : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %w = fsdp.all_gather @u %a : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  // expected-error @below {{Reshard-1: expected unit @u as its gather has, got: @v}}
  fsdp.reshard @v %w : tensor<4xf32>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.unit @v
fsdp.param @a : tensor<4xf32> unit @v sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  // expected-error @below {{ReduceScatter-1: expected @a in unit @u}}
  %r = fsdp.reduce_scatter @u avg [@a] %g : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @b : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  // expected-error @below {{ReduceScatter-1: expected parameters in unit order, got @a too late}}
  %r:2 = fsdp.reduce_scatter @u avg [@b, @a] %g, %g : (tensor<4xf32>, tensor<4xf32>) -> (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>)
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  // expected-error @below {{ReduceScatter-2: expected 'tensor<4xf32>' for @a, got: 'tensor<f32>'}}
  %r = fsdp.reduce_scatter @u avg [@a] %x : (tensor<f32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @a : tensor<4xf32> unit @u
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  // expected-error @below {{ReduceScatter-3: expected @a to have a sharding, it has none}}
  %r = fsdp.reduce_scatter @u avg [@a] %g : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %x : tensor<f32>
}
