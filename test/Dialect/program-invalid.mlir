// RUN: fsdp-opt --split-input-file --verify-diagnostics %s

fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  fsdp.phase backward
  // expected-error @below {{Program-1: expected phases in the order forward, backward, optimizer, got forward after backward}}
  fsdp.phase forward
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @use_after_reshard(%x: tensor<4xf32>) -> tensor<f32> {
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %w = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  // expected-note @below {{resharded here}}
  fsdp.reshard @u %w : tensor<4xf32>
  // expected-error @below {{Program-2: uses a parameter of unit @u after its reshard}}
  %y = aten.call "aten::dot"(%x, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
  fsdp.return %y : tensor<f32>
}

// -----

// A view of a view is still the parameter.
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @view_after_reshard(%x: tensor<4xf32>) -> tensor<f32> {
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %w = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  %a = aten.call "aten::view"(%w, [2, 2]) {views = array<i64: 0>} : (tensor<4xf32>) -> tensor<2x2xf32>
  %b = aten.call "aten::t"(%a) {views = array<i64: 0>} : (tensor<2x2xf32>) -> tensor<2x2xf32>
  // expected-note @below {{resharded here}}
  fsdp.reshard @u %w : tensor<4xf32>
  // expected-error @below {{Program-2: uses a parameter of unit @u after its reshard}}
  %y = aten.call "aten::sum"(%b, none) : (tensor<2x2xf32>) -> tensor<f32>
  fsdp.return %y : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @gathered_twice(%x: tensor<f32>) -> tensor<f32> {
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  // expected-note @below {{gathered here}}
  %a = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  // expected-error @below {{Program-3: gathers unit @u, which is gathered already}}
  %b = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @resharded_twice(%x: tensor<f32>) -> tensor<f32> {
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %w = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  // expected-note @below {{resharded here}}
  fsdp.reshard @u %w : tensor<4xf32>
  // expected-error @below {{Program-2: uses a parameter of unit @u after its reshard}}
  fsdp.reshard @u %w : tensor<4xf32>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @gathered_in_optimizer(%x: tensor<f32>) -> tensor<f32> {
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  // expected-error @below {{Program-3: expected an fsdp.reshard of unit @u before the optimizer phase, found none}}
  %w = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  fsdp.phase optimizer
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @reduced_twice(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  // expected-note @below {{reduced here}}
  %a = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  // expected-error @below {{Program-4: expected the gradient of @w to be reduced at most once}}
  %b = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.optimizer "sgd" {}
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @used_twice(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  %a = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  // expected-note @below {{used here}}
  fsdp.optimizer_step [@w] %a : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  // expected-error @below {{Program-4: expected the gradient of @w to be used at most once}}
  fsdp.gradients [@w] %a : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.program @use_after_free(%x: tensor<4xf32>) -> tensor<f32> {
  // expected-note @below {{freed here}}
  fsdp.free %x : tensor<4xf32>
  // expected-error @below {{Program-5: uses a value after its end}}
  %y = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.return %y : tensor<f32>
}

// -----

fsdp.param @w : tensor<4xf32> {frozen}
fsdp.program @frozen(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  // expected-error @below {{Program-6: expected no gradient for @w, which is frozen}}
  fsdp.gradients [@w] %g : tensor<4xf32>
  fsdp.return %x : tensor<f32>
}

// -----

// expected-error @below {{Program-7: expected no arguments of a program without a result, got: 1}}
fsdp.program @init(%x: tensor<4xf32>) {
  fsdp.return
}

// -----

fsdp.program @init() {
  // expected-error @below {{Program-7: expected no such op in a program without a result}}
  fsdp.phase forward
  fsdp.return
}

// -----

fsdp.param @w : tensor<4xf32>
fsdp.program @train_step(%x: tensor<f32>, %v: tensor<4xf32>) -> tensor<f32> {
  // expected-error @below {{Program-7: expected writes of parameters and buffers in a program without a result only}}
  fsdp.write_param @w, %v : tensor<4xf32>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.buffer @b : tensor<4xf32>
fsdp.program @init() {
  %v = aten.call "aten::zeros"([4], 6, none, device, none) : () -> tensor<4xf32>
  // expected-note @below {{written here}}
  fsdp.write_buffer @b, %v : tensor<4xf32>
  // expected-error @below {{Program-7: expected @b to be written at most once}}
  fsdp.write_buffer @b, %v : tensor<4xf32>
  fsdp.return
}

// -----

// expected-error @below {{Program-8: expected an evaluation to have a result, got none}}
fsdp.program @evaluate() attributes {evaluation} {
  fsdp.return
}

// -----

fsdp.program @train_step(%x: tensor<f32>) -> tensor<f32> {
  fsdp.return %x : tensor<f32>
}
// expected-error @below {{Program-8: expected the training step's arguments, '(tensor<f32>) -> tensor<f32>', got '(tensor<f32>, tensor<f32>) -> tensor<f32>'}}
fsdp.program @evaluate(%x: tensor<f32>, %y: tensor<f32>) -> tensor<f32> attributes {evaluation} {
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.program @evaluate(%x: tensor<f32>) -> tensor<f32> attributes {evaluation} {
  // expected-error @below {{Program-8: expected no such op in an evaluation}}
  fsdp.phase backward
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.param @w : tensor<4xf32>
fsdp.program @evaluate(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> attributes {evaluation} {
  // expected-error @below {{Program-8: expected no such op in an evaluation}}
  fsdp.gradients [@w] %g : tensor<4xf32>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=4]>
fsdp.unit @u {post_forward_size = 2 : i64}
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @evaluate(%x: tensor<f32>) -> tensor<f32> attributes {evaluation} {
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %w = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  // expected-error @below {{Program-8: expected nothing to be kept in an evaluation}}
  %k = fsdp.reshard @u %w : tensor<4xf32> to !fsdp.sharded<tensor<4xf32>, <@world, [{"shard":2}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.param @w : tensor<4xf32>
fsdp.program @writes_a_parameter(%x: tensor<f32>) -> tensor<f32> {
  // expected-note @below {{read here}}
  %w = fsdp.read @w : tensor<4xf32>
  // expected-error @below {{Program-13: writes the storage of parameter @w}}
  aten.call "aten::clamp_"(%w, 0.0, none) {mutates = array<i64: 0>, views = array<i64: 0>} : (tensor<4xf32>) -> tensor<4xf32>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.param @w : tensor<4xf32>
fsdp.program @writes_a_view_of_a_parameter(%x: tensor<f32>) -> tensor<f32> {
  // expected-note @below {{read here}}
  %w = fsdp.read @w : tensor<4xf32>
  %v = aten.call "aten::view"(%w, [2, 2]) {views = array<i64: 0>} : (tensor<4xf32>) -> tensor<2x2xf32>
  %s = aten.call "aten::select.int"(%v, 0, 1) {views = array<i64: 0>} : (tensor<2x2xf32>) -> tensor<2xf32>
  // expected-error @below {{Program-13: writes the storage of parameter @w}}
  aten.call "aten::zero_"(%s) {mutates = array<i64: 0>, views = array<i64: 0>} : (tensor<2xf32>) -> tensor<2xf32>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @writes_a_gathered_parameter(%x: tensor<f32>) -> tensor<f32> {
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %f = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.future<tensor<4xf32>>
  // expected-note @below {{read here}}
  %w = fsdp.wait %f : !fsdp.future<tensor<4xf32>>
  // expected-error @below {{Program-13: writes the storage of a parameter of unit @u}}
  aten.call "aten::add_.Tensor"(%w, %x, 1) {mutates = array<i64: 0>, views = array<i64: 0>} : (tensor<4xf32>, tensor<f32>) -> tensor<4xf32>
  fsdp.reshard @u %w : tensor<4xf32>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.param @w : tensor<4xf32>
fsdp.program @evaluate(%x: tensor<f32>) -> tensor<f32> attributes {evaluation} {
  // expected-note @below {{read here}}
  %w = fsdp.read @w : tensor<4xf32>
  // expected-error @below {{Program-13: writes the storage of parameter @w}}
  aten.call "aten::zero_"(%w) {mutates = array<i64: 0>, views = array<i64: 0>} : (tensor<4xf32>) -> tensor<4xf32>
  fsdp.return %x : tensor<f32>
}

// -----

// The gradient of @b is lost.
fsdp.param @a : tensor<4xf32>
// expected-note @below {{declared here}}
fsdp.param @b : tensor<4xf32>
fsdp.param @c : tensor<4xf32> {frozen}
fsdp.param @d : tensor<4xf32>
// expected-error @below {{Program-14: expected a gradient of @b, which is not frozen, or an fsdp.no_gradient, found none}}
fsdp.program @train_step(%x: tensor<4xf32>, %l: tensor<f32>) -> tensor<f32> {
  fsdp.phase forward
  fsdp.phase backward
  fsdp.no_gradient [@d]
  fsdp.gradients [@a] %x : tensor<4xf32>
  fsdp.return %l : tensor<f32>
}

// -----

// The gradient is reduced, but the update has lost it.
fsdp.mesh @world <["shard"=2]>
fsdp.optimizer "sgd" {}
fsdp.unit @u
// expected-note @below {{declared here}}
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
// expected-error @below {{Program-14: expected a gradient of @w}}
fsdp.program @train_step(%x: tensor<4xf32>, %l: tensor<f32>) -> tensor<f32> {
  fsdp.phase backward
  %s = fsdp.reduce_scatter @u avg [@w] %x : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.phase optimizer
  "fsdp.optimizer_step"() {param_names = []} : () -> ()
  fsdp.return %l : tensor<f32>
}

// -----

fsdp.param @w : tensor<4xf32>
fsdp.program @train_step(%x: tensor<4xf32>, %l: tensor<f32>) -> tensor<f32> {
  fsdp.no_gradient [@w]
  // expected-error @below {{Program-6: expected no gradient for @w, which an fsdp.no_gradient names}}
  fsdp.gradients [@w] %x : tensor<4xf32>
  fsdp.return %l : tensor<f32>
}

// -----

// expected-error @below {{Program-15: expected dense strides of 'tensor<4x2xf32>', got: array<i64: 0, 1>}}
fsdp.program @train_step(%x: tensor<4x2xf32> {fsdp.strides = array<i64: 0, 1>}, %l: tensor<f32>) -> tensor<f32> {
  fsdp.return %l : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.optimizer "sgd" {}
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>, %l: tensor<f32>) -> tensor<f32> {
  fsdp.phase backward
  fsdp.phase optimizer
  // expected-error @below {{Program-17: expected it before the optimizer phase, found it there}}
  %r = fsdp.reduce_scatter @u avg [@w] %x : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.optimizer_step [@w] %r : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %l : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.optimizer "sgd" {}
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>, %l: tensor<f32>) -> tensor<f32> {
  fsdp.phase backward
  %r = fsdp.reduce_scatter @u avg [@w] %x : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  // expected-error @below {{Program-17: expected it in the optimizer phase, found it in backward}}
  %u = fsdp.unscale [@w] %r : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.gradients [@w] %u : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %l : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.optimizer "sgd" {}
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>, %l: tensor<f32>) -> tensor<f32> {
  fsdp.phase backward
  %r = fsdp.reduce_scatter @u avg [@w] %x : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.phase optimizer
  %c = fsdp.clip_grad_norm [@w] %r {max_norm = 0.5, norm_type = 2.0} : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  // expected-error @below {{Program-17: expected the order fsdp.unscale, fsdp.clip_grad_norm, fsdp.optimizer_step}}
  %u = fsdp.unscale [@w] %c : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.optimizer_step [@w] %u : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %l : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.optimizer "sgd" {}
fsdp.unit @u
fsdp.param @v : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>, %l: tensor<f32>) -> tensor<f32> {
  fsdp.phase backward
  %f = fsdp.reduce_scatter @u avg [@v, @w] %x, %x : (tensor<4xf32>, tensor<4xf32>) -> !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  %r:2 = fsdp.wait %f : !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  fsdp.phase optimizer
  // expected-error @below {{Program-18: expected the gradient of @v, got that of @w}}
  fsdp.optimizer_step [@v, @w] %r#1, %r#0 : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %l : tensor<f32>
}

// -----

// Attributes of arguments are verified before there is a body.
// expected-error @below {{Input-1: expected a number for each dimension as fsdp.strides of argument 0}}
fsdp.program @step(tensor<4xf32> {fsdp.strides = array<i64: 1, 1>}) -> tensor<f32>
