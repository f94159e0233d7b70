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
