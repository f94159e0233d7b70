// RUN: fsdp-opt --fsdp-insert-optimizer --verify-diagnostics %s

// expected-error @below {{expected an fsdp.optimizer in the module, got none}}
module {
  fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
    %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
    fsdp.return %loss : tensor<f32>
  }
}
