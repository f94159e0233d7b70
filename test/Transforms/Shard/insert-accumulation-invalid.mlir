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

// expected-error @below {{reduce_each_microbatch = false with the mixed precision of unit @u is not supported yet}}
fsdp.accumulation {reduce_each_microbatch = false, steps = 2}
fsdp.unit @u {mixed_precision = #fsdp.mixed_precision<param_dtype = bf16>}
fsdp.param @w : tensor<4xf32> unit @u {compute_dtype = bf16}
fsdp.program @train_step(%x: tensor<4xbf16>) -> tensor<bf16> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xbf16>) -> tensor<bf16>
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%loss, none, none, none, false, 1) : (tensor<bf16>) -> tensor<bf16>
  fsdp.return %loss : tensor<bf16>
}
