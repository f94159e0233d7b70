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
