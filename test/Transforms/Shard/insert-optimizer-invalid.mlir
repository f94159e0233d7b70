// RUN: fsdp-opt --fsdp-insert-optimizer --split-input-file --verify-diagnostics %s

// expected-error @below {{expected an fsdp.optimizer in the module, got none}}
module {
  fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
    %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
    fsdp.return %loss : tensor<f32>
  }
}

// -----

fsdp.optimizer "sgd" {}
fsdp.param_group "**.bias" {lr = 0.1}
// expected-error @below {{expected pattern "a.bias" to match a parameter that no group before it matches, found none}}
fsdp.param_group "a.bias" {lr = 0.2}
fsdp.param @a.bias : tensor<4xf32>
fsdp.program @train_step(%loss: tensor<f32>) -> tensor<f32> {
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.optimizer "sgd" {}
// expected-error @below {{expected pattern "b.bias" to match a parameter that no group before it matches, found none}}
fsdp.param_group "a.bias", "b.bias" {lr = 0.2}
fsdp.param @a.bias : tensor<4xf32>
fsdp.program @train_step(%loss: tensor<f32>) -> tensor<f32> {
  fsdp.return %loss : tensor<f32>
}
