// RUN: fsdp-opt --fsdp-insert-loss-scaling --split-input-file --verify-diagnostics %s

fsdp.grad_scaler {backoff_factor = 0.5, growth_factor = 2.0, growth_interval = 2000, init_scale = 65536.0}
// expected-error @below {{expected backward to begin with aten::ones_like of the loss: loss scaling replaces it}}
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %g = aten.call "aten::mul.Tensor"(%x, %loss) : (tensor<4xf32>, tensor<f32>) -> tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// expected-error @below {{expected the program to have gradient shards, found none}}
fsdp.grad_scaler {backoff_factor = 0.5, growth_factor = 2.0, growth_interval = 2000, init_scale = 65536.0}
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%loss, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
  fsdp.return %loss : tensor<f32>
}

// -----

// expected-error @below {{expected no ignored parameter in a model whose gradients are scaled, got: "own"}}
fsdp.grad_scaler {backoff_factor = 0.5, growth_factor = 2.0, growth_interval = 2000, init_scale = 65536.0}
fsdp.param @own : tensor<4xf32> {ignored}
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%loss, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
  fsdp.gradients [@own] %x : tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// A number of the loss's type, which is not the 1 that backward begins with.

fsdp.grad_scaler {backoff_factor = 0.5, growth_factor = 2.0, growth_interval = 2000, init_scale = 65536.0}
// expected-error @below {{expected backward to begin with aten::ones_like of the loss: loss scaling replaces it}}
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %two = aten.call "aten::full"([], 2, 6, 0, device, false) : () -> tensor<f32>
  %g = aten.call "aten::mul.Tensor"(%x, %two) : (tensor<4xf32>, tensor<f32>) -> tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}
