// RUN: fsdp-opt --fsdp-insert-all-gathers --split-input-file --verify-diagnostics %s

fsdp.unit @u
// expected-error @below {{expected a sharding: run fsdp-place-params first}}
fsdp.param @w : tensor<4xf32> unit @u
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  %w = fsdp.read @w : tensor<4xf32>
  fsdp.phase forward
  %loss = aten.call "aten::dot"(%x, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
  fsdp.return %loss : tensor<f32>
}

// -----

// expected-error @below {{expected an fsdp.program with a result in the module, got none}}
module {
}

// -----

fsdp.program @train_step(%x: tensor<f32>) -> tensor<f32> {
  fsdp.return %x : tensor<f32>
}
fsdp.program @init() {
  fsdp.return
}
// expected-error @below {{expected one program without a result in the module, got another}}
fsdp.program @again() {
  fsdp.return
}

// -----

fsdp.program @train_step(%x: tensor<f32>) -> tensor<f32> {
  fsdp.return %x : tensor<f32>
}
// expected-error @below {{expected one program with a result in the module, got another}}
fsdp.program @again(%x: tensor<f32>) -> tensor<f32> {
  fsdp.return %x : tensor<f32>
}

// -----

// expected-error @below {{expected a unit: run fsdp-assign-units first}}
fsdp.param @w : tensor<4xf32>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  %w = fsdp.read @w : tensor<4xf32>
  fsdp.phase forward
  %loss = aten.call "aten::dot"(%x, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
  fsdp.return %loss : tensor<f32>
}
