// RUN: fsdp-opt --fsdp-offload-activations --verify-diagnostics %s

// expected-error @below {{pattern "layers.*" matches no module that is called}}
fsdp.offload_pattern "layers.*"
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) {fsdp.module = "layer"} : (tensor<4xf32>) -> tensor<f32>
  fsdp.return %loss : tensor<f32>
}
