// RUN: fsdp-opt --fsdp-insert-accumulation --split-input-file --verify-diagnostics %s

fsdp.accumulation {reduce_each_microbatch = true, steps = 2}
// expected-error @below {{expected backward to begin with aten::ones_like of the loss: accumulation scales it}}
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %g = aten.call "aten::mul.Tensor"(%x, %loss) : (tensor<4xf32>, tensor<f32>) -> tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.accumulation {reduce_each_microbatch = false, steps = 2}
// expected-error @below {{unit "u" is called several times in a step, or its parameters are used elsewhere: FSDP2 reduces what microbatches add up apart from the gradients of the last one; expected "reduce_each_microbatch" and "all_reduce_each_microbatch" to be true}}
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]> {post_backward = 1 : i64}
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%loss, none, none, none, none, none) : (tensor<f32>) -> tensor<f32>
  %g = aten.call "aten::mul.Tensor"(%x, %one) : (tensor<4xf32>, tensor<f32>) -> tensor<4xf32>
  %s = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.gradients [@w] %s : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.mesh @world <["replicate"=2, "shard"=2]>
fsdp.unit @u
fsdp.accumulation {all_reduce_each_microbatch = false, reduce_each_microbatch = true, steps = 2}
// What has no unit is not reduced with one.
fsdp.param @ignored : tensor<4xf32> {ignored, frozen, post_backward = 1 : i64}
// expected-error @below {{unit "u" is called several times in a step}}
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]> {post_backward = 1 : i64}
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%loss, none, none, none, none, none) : (tensor<f32>) -> tensor<f32>
  %g = aten.call "aten::mul.Tensor"(%x, %one) : (tensor<4xf32>, tensor<f32>) -> tensor<4xf32>
  %p = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>
  %s = fsdp.all_reduce @u avg over "replicate" [@w] %p : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.gradients [@w] %s : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}
