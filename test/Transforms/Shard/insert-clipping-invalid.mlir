// RUN: fsdp-opt --fsdp-insert-clipping --split-input-file --verify-diagnostics %s

// expected-error @below {{expected the program to have gradient shards, found none}}
fsdp.gradient_clipping {max_norm = 0.5, norm_type = 2.0}
fsdp.program @train_step(%loss: tensor<f32>) -> tensor<f32> {
  fsdp.return %loss : tensor<f32>
}

// -----

// FSDP2's clip_grad_norm_ fails on DTensors and plain tensors together.

fsdp.mesh @world <["shard"=2]>
// expected-error @below {{expected no ignored parameter in a model whose gradients are clipped, got: "own"}}
fsdp.gradient_clipping {max_norm = 0.5, norm_type = 2.0}
fsdp.param @w : tensor<4xf32> sharding <@world, [{"shard"}]>
fsdp.param @own : tensor<4xf32> {ignored}
fsdp.program @train_step(%loss: tensor<f32>) -> tensor<f32> {
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.gradients [@w] %s : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}
