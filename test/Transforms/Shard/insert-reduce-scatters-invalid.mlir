// RUN: fsdp-opt --fsdp-insert-reduce-scatters --split-input-file --verify-diagnostics %s

fsdp.unit @u
// expected-error @below {{expected a sharding: run fsdp-place-params first}}
fsdp.param @w : tensor<4xf32> unit @u
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %g = aten.call "aten::relu"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  fsdp.gradients [@w] %g : tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}
