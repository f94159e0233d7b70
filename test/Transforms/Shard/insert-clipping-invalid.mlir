// RUN: fsdp-opt --fsdp-insert-clipping --verify-diagnostics %s

// expected-error @below {{expected the program to write gradients' shards, found none}}
fsdp.gradient_clipping {max_norm = 0.5, norm_type = 2.0}
fsdp.program @train_step(%loss: tensor<f32>) -> tensor<f32> {
  fsdp.return %loss : tensor<f32>
}
