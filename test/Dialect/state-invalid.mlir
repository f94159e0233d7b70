// RUN: fsdp-opt --split-input-file --verify-diagnostics %s

fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  // expected-error @below {{Read-1: expected @w to name an fsdp.param, found none}}
  %w = fsdp.read @w : tensor<4xf32>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.param @w : tensor<4xf32>
fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  // expected-error @below {{Read-1: expected 'tensor<4xf32>' for @w, got: 'tensor<8xf32>'}}
  %w = fsdp.read @w : tensor<8xf32>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.param @w : tensor<4x2xf32> sharding <@world, [{"shard"}, {}]>
fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  // expected-error @below {{Read-1: expected 'tensor<4x2xf32>' or '!fsdp.sharded<tensor<4x2xf32>, <@world, [{"shard"}, {}]>>' for @w, got: '!fsdp.sharded<tensor<4x2xf32>, <@world, [{}, {"shard"}]>>'}}
  %w = fsdp.read @w : !fsdp.sharded<tensor<4x2xf32>, <@world, [{}, {"shard"}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.buffer @b : tensor<4xf32>
fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  // expected-error @below {{ReadBuffer-1: expected 'tensor<4xf32>' for @b, got: 'tensor<8xf32>'}}
  %b = fsdp.read_buffer @b : tensor<8xf32>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.param @w : tensor<4xf32>
fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  // expected-error @below {{Gradients-1: expected 'tensor<4xf32>' or its part of the mesh for @w, got: 'tensor<f32>'}}
  fsdp.gradients [@w] %x : tensor<f32>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.param @v : tensor<4xf32>
fsdp.param @w : tensor<4xf32>
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  // expected-error @below {{Gradients-1: expected each parameter once, in the order of the module, got @v too late}}
  fsdp.gradients [@w, @v] %g, %g : tensor<4xf32>, tensor<4xf32>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.param @w : tensor<4xf32>
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  // expected-error @below {{Gradients-1: expected 1 gradients, got: 2}}
  fsdp.gradients [@w] %g, %g : tensor<4xf32>, tensor<4xf32>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.param @w : tensor<4xf32>
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  // expected-error @below {{Gradients-2: expected fsdp.return to follow}}
  fsdp.gradients [@w] %g : tensor<4xf32>
  fsdp.phase optimizer
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.param @w : tensor<4xf32> {frozen}
fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  // expected-error @below {{NoGradient-1: expected @w not to be frozen}}
  fsdp.no_gradient [@w]
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.param @w : tensor<4xf32>
fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  fsdp.no_gradient [@w]
  // expected-error @below {{NoGradient-1: expected @w to be named once}}
  fsdp.no_gradient [@w]
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>, %g: !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["stage"]>>) -> tensor<f32> {
  // expected-error @below {{Gradients-1: expected 'tensor<4xf32>' or its part of the mesh for @w, got: '!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["stage"]>>'}}
  fsdp.gradients [@w] %g : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["stage"]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.param @w : tensor<4xf32>
fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  // expected-error @below {{NoGradient-1: expected @w to be named once}}
  fsdp.no_gradient [@w, @w]
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.program @p(%x: tensor<4xf32>) -> tensor<f32> {
  // expected-error @below {{expected the result type of the program, got: 'tensor<4xf32>'}}
  fsdp.return %x : tensor<4xf32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.optimizer "sgd" {}
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @v : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  %r = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  // expected-error @below {{OptimizerStep-1: expected 2 gradients, got: 1}}
  fsdp.optimizer_step [@w, @v] %r : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  %r = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  // expected-error @below {{OptimizerStep-2: expected one fsdp.optimizer in the module, got: 0}}
  fsdp.optimizer_step [@w] %r : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.param @w : tensor<4xf32>
fsdp.program @init() {
  %v = aten.call "aten::zeros"([8], 6, none, device, none) : () -> tensor<8xf32>
  // expected-error @below {{WriteParam-1: expected 'tensor<4xf32>' for @w, got: 'tensor<8xf32>'}}
  fsdp.write_param @w, %v : tensor<8xf32>
  fsdp.return
}

// -----

fsdp.param @w : tensor<4xf32>
fsdp.program @init() {
  %v = aten.call "aten::zeros"([4], 6, none, device, none) : () -> tensor<4xf32>
  // expected-error @below {{WriteBuffer-1: expected @w to name an fsdp.buffer, found none}}
  fsdp.write_buffer @w, %v : tensor<4xf32>
  fsdp.return
}

// -----

fsdp.buffer @b : tensor<4xf32>
fsdp.program @init() {
  %v = aten.call "aten::zeros"([4], 7, none, device, none) : () -> tensor<4xf64>
  // expected-error @below {{WriteBuffer-1: expected 'tensor<4xf32>' for @b, got: 'tensor<4xf64>'}}
  fsdp.write_buffer @b, %v : tensor<4xf64>
  fsdp.return
}

// -----

fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  // expected-error @below {{expected the loss of the program, whose result is 'tensor<f32>', got none}}
  fsdp.return
}

// -----

fsdp.program @init() {
  %v = aten.call "aten::zeros"([4], 6, none, device, none) : () -> tensor<4xf32>
  // expected-error @below {{expected the result type of the program, got: 'tensor<4xf32>'}}
  fsdp.return %v : tensor<4xf32>
}
